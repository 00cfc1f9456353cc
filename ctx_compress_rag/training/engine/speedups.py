"""Faster training of adapters on a frozen decoder, with compiled layers and weights in bfloat16."""

import logging
from typing import Any

import torch

from ctx_compress_rag.models.layers import decoder_layers
from ctx_compress_rag.training.config import OptimConfig
from ctx_compress_rag.training.engine.torch_internals import compile_for_all, cpu_has_bfloat16

logger = logging.getLogger(__name__)


def speed_up_training(model: Any, optim: OptimConfig, dynamic: bool = False, saved: bool = False) -> None:
    """Compile a decoder, and round its frozen weights unless they will be `saved`, in place, as far as `optim` says.

    Trained weights must require gradients before. `dynamic` says that batches differ in shape.
    """
    if optim.bf16 and not saved and bfloat16_pays():
        round_frozen_weights(model)
    if optim.compile:
        compile_decoder_layers(model, dynamic)


def compile_decoder_layers(model: Any, dynamic: bool = False) -> None:
    """Compile each decoder layer for every shape it meets or, if `dynamic`, for all shapes. All layers share the code.

    On a CPU attention is eager, so that it is fused with the operations around it. For rows of a few hundred tokens the
    backward pass of transformers' fused attention is slower there.
    """
    compile_for_all()
    if model.device.type == "cpu":
        model.set_attn_implementation("eager")
    for layer in decoder_layers(model):
        layer.compile(dynamic=dynamic)


def round_frozen_weights(model: Any) -> None:
    """Convert weights that are not trained to bfloat16, in place, so that they are not cast at every use."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


def bfloat16_pays() -> bool:
    """Whether bfloat16 is fast on the training device: True on CUDA, else whether the CPU has instructions for it.

    False is logged. A CPU with AVX2 only took 357 ms for 1920 x 576 x 1536 in bfloat16, and 38 to 75 ms in float32.
    """
    if torch.cuda.is_available():
        return True
    pays = cpu_has_bfloat16()
    if not pays:
        logger.warning("bf16: this CPU has no bfloat16 instructions; training in float32, which is faster on it")
    return pays
