"""Tiny ComprExIT bundles whose every weight matters, and what a decoder's blocks give."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.methods.base.compressor import SlotBatch, pad_token_ids
from ctx_compress_rag.methods.comprexit import ComprexitCompressor, ComprexitConfig
from ctx_compress_rag.models.backbone import Backbone
from helpers.methods import COMPREXIT
from helpers.models import tiny_config, tiny_llama

SMALL: dict[str, Any] = COMPREXIT | {"transport_dim": 6, "temperature": 2.0}


def comprexit_bundle(tokenizer: Any, seed: int = 0, **method: Any) -> Bundle:
    """A bundle whose every weight is random and matters; keywords are ComprexitConfig's."""
    torch.manual_seed(seed)
    model = tiny_llama(
        tokenizer, hidden_size=20, intermediate_size=32, num_hidden_layers=3, head_dim=10, initializer_range=0.3
    )
    config = tiny_config(method=ComprexitConfig(**{**SMALL, **method}), ratios=[4])
    bundle = Bundle.build(config, Backbone(model, tokenizer))
    for parameter in [*bundle.compressor.parameters(), *bundle.reader.parameters()]:
        torch.nn.init.normal_(parameter, std=0.5)
    return bundle


def encode(compressor: ComprexitCompressor, passages: Sequence[Sequence[int]], ratio: int) -> SlotBatch:
    ids, mask = pad_token_ids(passages, torch.device("cpu"))
    with torch.no_grad():
        return compressor.encode(ids, mask, [ratio])[ratio]


def some_ids(length: int) -> list[int]:
    return [37 * i % 500 + 20 for i in range(length)]


def blocks_outputs(model: Any, ids: Sequence[int]) -> list[Tensor]:
    """The outputs of the decoder's blocks, taken where they come out; the last one after the final norm."""
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: outputs.append(out if torch.is_tensor(out) else out[0]))
        for layer in model.base_model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
        outputs[-1] = model.base_model.norm(outputs[-1])
    for hook in hooks:
        hook.remove()
    return [out[0] for out in outputs]
