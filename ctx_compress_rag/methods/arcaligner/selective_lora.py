"""Selective LoRA: low-rank updates at slot positions only (ArcAligner, section 3.3)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.arcaligner.config import SelectiveLoraConfig
from ctx_compress_rag.methods.base.part import UnregisteredModule, linear_layers


class SlotPlaces:
    """Where the slots of a batch are.

    Attributes:
        mask: bool (batch, length).
        index: int64 (slots,): the slots' places among all positions, row after row.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.index = mask.flatten().nonzero().squeeze(1)

    def take(self, states: Tensor) -> Tensor:
        """The states at slots: (batch, length, dim) -> (slots, dim).

        Raises:
            ConfigError: `states` are not those of all positions, for example because a router sends tokens to experts.
        """
        rows = states.flatten(0, -2)
        if len(rows) != self.mask.numel():
            raise ConfigError(f"a layer got only {len(rows)} of {self.mask.numel()} positions: choose another decoder")
        return rows[self.index]


class SlotUpdate(nn.Module):
    """The low-rank update of one frozen linear layer: (alpha / rank) B A x, zero until it is trained."""

    def __init__(self, linear: nn.Linear, config: SelectiveLoraConfig) -> None:
        super().__init__()
        self.scale = config.alpha / config.rank
        self.dropout = config.dropout
        self.a = nn.Parameter(torch.empty(config.rank, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, config.rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """The update for the layer's inputs at slots.

        Shape: (slots, in) -> (slots, out)
        """
        x = F.dropout(x.to(self.a.dtype), self.dropout, self.training and torch.is_grad_enabled())
        return self.scale * F.linear(F.linear(x, self.a), self.b)


class SelectiveLora(nn.Module):
    """M * (B A x) beside every linear layer of one decoder layer.

    Equation 3 writes the layer as F(H) + M * dF(H) and leaves open where the mask M enters. At the layer's
    output, it would need two runs, and two sets of keys and values for each position: a text position on the
    frozen path would have to see the slots' frozen keys, and a slot the text's adapted keys. Here the mask
    enters each linear layer, W x + M * B A x, as in the method that the paper cites for it (P-LoRA; Dong et
    al., 2024): dF is everything that these updates change. A text position then uses only frozen weights, at
    every layer, and its keys and values are the frozen decoder's for its state. That state is the frozen
    model's as long as no slot precedes it; after a slot, it has read the slot's adapted keys and values, which
    is the purpose of the update.

    Attributes:
        slots: where updates are added now; None outside `on`.

    Raises:
        ConfigError: the layer has no linear layers.
    """

    def __init__(self, layer: nn.Module, config: SelectiveLoraConfig) -> None:
        super().__init__()
        linears = {name.replace(".", "_"): linear for name, linear in linear_layers(layer)}
        if not linears:
            raise ConfigError(
                f"{type(layer).__name__} has no nn.Linear to adapt: this decoder cannot take selective LoRA"
            )
        self.updates = nn.ModuleDict({name: SlotUpdate(linear, config) for name, linear in linears.items()})
        self._linears = UnregisteredModule(list(linears.values()))
        self.slots: SlotPlaces | None = None

    @contextmanager
    def on(self, slots: SlotPlaces) -> Iterator[None]:
        """Add the updates at slots within the context; a nested context uses its own slots."""
        outer, self.slots = self.slots, slots
        with ExitStack() as hooks:
            if outer is None:
                for linear, update in zip(self._linears.value, self.updates.values(), strict=True):
                    hooks.callback(linear.register_forward_hook(partial(self._add, update)).remove)
            try:
                yield
            finally:
                self.slots = outer

    def _add(self, update: nn.Module, linear: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        assert self.slots is not None  # it is `on`
        # In place, at slots only: other positions stay bit-identical and cost nothing.
        change = update(self.slots.take(args[0])).to(output.dtype)
        output.view(-1, output.shape[-1]).index_add_(0, self.slots.index, change)


def twin(model: nn.Module) -> Any:
    """A copy of the modules that shares their tensors: hooks on one do not affect the other."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)
