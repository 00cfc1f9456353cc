"""A decoder's own tensors (weights and the buffers that its files hold, without adapters), and weights in 8 bits.

In 8 bits, each row of a matrix is stored as integers from -127 to 127 and one scale.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def name_without_peft(name: str) -> str:
    """Return a parameter's name without the parts that peft adds: one for a layer, two for a mixture of experts."""
    return name.replace("base_layer.", "")


def own_tensors(model: Any) -> dict[str, Tensor]:
    """Return what a causal LM's files hold, weights and buffers, each tied tensor once; no memory is copied."""
    once = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    state = model.state_dict().items()
    return {name_without_peft(name): value for name, value in state if name in once and "lora_" not in name}


def own_buffers(model: Any) -> dict[str, Tensor]:
    """Return those of `own_tensors` that are buffers, which stay exact however weights are stored."""
    weights = {name_without_peft(name) for name, _ in model.named_parameters()}
    return {name: value for name, value in own_tensors(model).items() if name not in weights}


def load_own_tensors(model: Any, state: Mapping[str, Tensor]) -> None:
    """Copy an `own_tensors` into a causal LM; raise KeyError if a tensor is missing."""
    with torch.no_grad():
        for name, tensor in own_tensors(model).items():
            tensor.copy_(state[name])


_SCALE = ".int8_scale"
_SMALLEST = 4096  # entries; packing smaller tensors saves little
_LARGEST_ERROR = 0.02  # relative, of the whole matrix; normally distributed rows have 0.007


def weights_to_int8(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert matrices to int8 with a float16 scale for each row, and everything else to float16.

    The largest entry of a row becomes 127 or -127, and no entry moves by more than half a step of its row. A matrix
    that moves by more than 2% in all stays in float16, as one near the identity, whose small entries are below a step.
    """
    stored: dict[str, Tensor] = {}
    for name, value in state.items():
        if value.ndim != 2 or value.numel() < _SMALLEST:
            stored[name] = value.to(torch.float16)
            continue
        rows = value.float()
        # A scale rounded down to half precision would push the largest entry over 127.
        scale = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-7).to(torch.float16)
        steps = (rows / scale.float()).round().clamp(-127, 127)
        if torch.linalg.norm(steps * scale.float() - rows) > _LARGEST_ERROR * torch.linalg.norm(rows):
            stored[name] = value.to(torch.float16)
            continue
        stored[name] = steps.to(torch.int8)
        stored[name + _SCALE] = scale
    return stored


def weights_from_int8(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the result of `weights_to_int8` to float16; tensors that are not packed stay as they are."""
    return {
        name: value if value.dtype != torch.int8 else (value.float() * stored[name + _SCALE].float()).to(torch.float16)
        for name, value in stored.items()
        if not name.endswith(_SCALE)
    }
