"""A linear layer with LoRA, as peft makes, loads and merges it, with a shorter forward pass."""

from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn import functional as F

Plan = tuple[tuple[Tensor, Tensor, float], ...]


class AdaptedLinear(Linear):
    """Linear layer with LoRA, without peft's checks, casts, scaling: a fifth of a token's time in a small decoder."""

    plan: Plan = ()  # A, B and scale of each active adapter

    def plan_of(self, shares: Mapping[str, float]) -> Plan:
        """Return the plan that applies these shares of adapters' changes; other adapters apply nothing."""
        return tuple(
            (self.get_parameter(f"lora_A.{name}.weight"), self.get_parameter(f"lora_B.{name}.weight"), share * scale)
            for name, share in shares.items()
            if (scale := self.scaling.get(name)) is not None
        )

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.base_layer(x, *args, **kwargs)
        dtype = out.dtype
        for a, b, scale in self.plan:
            out = torch.add(out, F.linear(F.linear(x.to(a.dtype), a), b), alpha=scale)
        return out.to(dtype)


def shorten_forward(layer: Any) -> None:
    """Make peft's plain linear layer an `AdaptedLinear`, and undo it if an adapter of the layer is not plain LoRA."""
    if type(layer) in (Linear, AdaptedLinear):
        plain = not layer.lora_variant and not any(layer.lora_bias.values())
        plain = plain and all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values())
        layer.__class__ = AdaptedLinear if plain else Linear
