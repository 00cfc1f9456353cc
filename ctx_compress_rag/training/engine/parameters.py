"""The trained parameters of a model, those that require gradients, by name."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def all_finite(model: nn.Module) -> bool:
    """Whether no trained parameter is NaN or infinite, in this process's part of them."""
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in trained(model).values())
    return all(bool(part.isfinite().all()) for part in parts)
