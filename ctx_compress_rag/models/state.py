"""A decoder's own tensors: weights and the buffers that its files hold, without adapters."""

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
