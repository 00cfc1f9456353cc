"""The trained parameters of a model, those that require gradients, by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Values of the trained parameters, on the CPU."""
    return {name: p.detach().cpu().contiguous() for name, p in trained(model).items()}


def all_finite(model: nn.Module) -> bool:
    """Whether no trained parameter is NaN or infinite, in this process's part of them."""
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in trained(model).values())
    return all(bool(part.isfinite().all()) for part in parts)


def load_trained_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy values into the trained parameters.

    Raises:
        ValueError: the values are from another model.
    """
    parameters = trained(model)
    if odd := parameters.keys() ^ state.keys():
        raise ValueError(f"the checkpoint is of another model: {len(odd)} parameters differ, for example {min(odd)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
