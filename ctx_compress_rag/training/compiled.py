"""A frozen decoder made fast to train on: its layers compiled, its weights in bfloat16."""

from __future__ import annotations

from typing import Any

import torch

from ctx_compress_rag.backbone import decoder_layers


def compile_layers(model: Any) -> None:
    """Compile each decoder layer for every shape it meets; all layers are the same code, compiled once.

    Attention is written out, so that it is fused with what is around it: for rows of a few hundred tokens the
    backward pass of transformers' fused attention is slower on a CPU.
    """
    # A machine without a compiler trains all the same, more slowly.
    torch._dynamo.config.suppress_errors = True
    model.set_attn_implementation("eager")
    for layer in decoder_layers(model.base_model, model.config.get_text_config().num_hidden_layers):
        layer.compile(dynamic=False)


def round_frozen(model: Any) -> None:
    """Bring weights that are not trained to bfloat16, once, in place of a cast at every use."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
