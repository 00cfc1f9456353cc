"""LoRA layers trained as one matrix product each, instead of peft's three products and a sum."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn import functional as F


class _MergedProduct(torch.autograd.Function):
    """x (W + s B A)^T for a frozen W, with gradients only for x, A and B.

    Summing the weights costs one product over the rank per batch, not per token. The gradients go through the
    thin matrices, as peft's do: a gradient of the whole matrix is never computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        merged = torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scale)
        ctx.save_for_backward(x, merged, a, b)
        ctx.scale = scale
        return F.linear(x, merged)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, Tensor, None]:
        x, merged, a, b = ctx.saved_tensors
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)
        to_a = (rows @ b.to(rows.dtype)).t() @ inputs
        to_b = rows.t() @ (inputs @ a.to(inputs.dtype).t())
        to_x = (rows @ merged).view_as(x)
        return to_x, None, to_a.to(a.dtype) * ctx.scale, to_b.to(b.dtype) * ctx.scale, None


def merge_lora(model: nn.Module) -> None:
    """Compute every LoRA layer over a frozen linear layer as one product, except those with dropout.

    With weights in bfloat16 the sum is rounded to bfloat16.
    """
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if type(module) is Linear and isinstance(base, nn.Linear) and not base.weight.requires_grad:
            # A method, not a closure: all layers then have the same code, and share it when they are compiled.
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(layer: Linear, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What peft's LoRA over a linear layer computes, as one product."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    simple = len(active) == 1 and not (args or kwargs or layer.disable_adapters or layer.merged)
    if not simple or active[0] in layer.lora_variant or not isinstance(layer.lora_dropout[active[0]], nn.Identity):
        return Linear.forward(layer, x, *args, **kwargs)
    (name,) = active
    base: Any = layer.base_layer
    a: Any = layer.lora_A[name]
    b: Any = layer.lora_B[name]
    # Autocast does not apply inside a custom autograd function.
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else base.weight.dtype
    with torch.autocast(device, enabled=False):
        product: Tensor = _MergedProduct.apply(  # type: ignore[no-untyped-call]
            x.to(dtype), base.weight.to(dtype), a.weight, b.weight, layer.scaling[name]
        )
        for bias in (base.bias, b.bias if b.bias is None else b.bias * layer.scaling[name]):
            if bias is not None:
                product = product + bias.to(dtype)
    return product
