"""Weights in 8 bits: each row of a matrix is stored as integers from -127 to 127 and one scale."""

from collections.abc import Mapping

import torch
from torch import Tensor

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
