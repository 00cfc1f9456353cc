"""A layer's recursive passes, computed only at the slots that they refine (ArcAligner, eq. 6)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ctx_compress_rag.methods.arcaligner.selective_lora import SelectiveLora, SlotPlaces


class Recursion:
    """The passes of one layer over one prompt after the mandatory one.

    Equation 6 runs the layer on all of H^(l+1,t-1), but equation 9 keeps only its outputs at slots. So attention
    and the MLP are computed only at slots. Keys and values are needed for everything a slot sees: the first pass
    projects the states up to the last slot, each later pass those of the slots that the previous one changed.

    The layer's own code runs, whatever the architecture: it is called with fewer positions, and this object takes the
    place of its cache. If its attention takes no mask of (queries, keys), as with flash attention, it gets all
    positions instead.

    `args` and `kwargs` are those of the mandatory pass, its states first.
    """

    def __init__(
        self,
        layer: nn.Module,
        lora: SelectiveLora | None,
        slots: SlotPlaces,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._layer, self._lora, self._slots = layer, lora, slots.mask
        given = named(layer, args, kwargs)
        del given[parameters(type(layer).forward)[0]]  # the states
        # Only the mandatory pass writes to the layer's cache, whatever its argument is called.
        self._given = {
            name: value for name, value in given.items() if name != "use_cache" and not isinstance(value, Cache)
        }
        mask = given.get("attention_mask")
        implementation = getattr(getattr(layer, "self_attn", None), "config", None)
        masked = getattr(implementation, "_attn_implementation", None) in ("sdpa", "eager")
        self._sparse = masked and (mask is None or mask.dim() == 4)
        self._length = int(slots.mask.any(0).nonzero()[-1]) + 1
        self._stale: Tensor | None = None  # None: no keys yet
        self._keys = self._values = torch.empty(0)

    def __call__(self, state: Tensor, at: Tensor) -> Tensor:
        """Run the layer at these slots.

        Args:
            state: H^(l+1,t-1): (batch, length, dim). Since the last call, only that call's slots have changed.
            at: which slots, a subset of the last call's: bool (batch, length).

        Returns:
            The slots' candidates, in the order of `state[at]`: (slots, dim).
        """
        if not self._sparse:
            return states_of(self._layer.forward(state, **self._given))[at]
        if self._stale is None:
            stale = torch.arange(self._length, device=state.device).expand(len(state), -1)
        else:
            stale = _places(self._stale)
        self._run(state, stale, _Taking(self, stale))
        self._stale = at
        places = _places(at)
        return self._run(state, places, self)[at.gather(1, places)]

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Act as the cache: return the keys and values of all visible positions, including the queries' own."""
        return self._keys, self._values

    def keep(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """Store keys and values (batch, heads, positions, width) at their places (batch, positions)."""
        if self._stale is None:
            self._keys, self._values = keys, values
            return
        index = places[:, None, :, None]
        self._keys = self._keys.scatter(2, index.expand_as(keys), keys)
        self._values = self._values.scatter(2, index.expand_as(values), values)

    def _run(self, state: Tensor, places: Tensor, cache: Any) -> Tensor:
        """Run the layer on the positions `places` (batch, positions) of `state`."""
        batch, count = places.shape

        def chosen(value: Tensor) -> Tensor:
            """`value` (batch or 1, length, ...) at the places."""
            rows = value.expand(batch, *value.shape[1:])
            return rows[torch.arange(batch, device=places.device)[:, None], places]

        mask = self._given.get("attention_mask")
        if mask is None:  # plain causal attention
            mask = (torch.arange(self._length, device=state.device) <= places[..., None]).unsqueeze(1)
        else:
            rows = mask[..., : self._length].expand(batch, -1, -1, -1)
            mask = rows.gather(2, places[:, None, :, None].expand(-1, rows.shape[1], -1, self._length))
        given = self._given | {"attention_mask": mask, "past_key_values": cache}
        for name, value in self._given.items():
            if name == "position_embeddings" and value is not None:
                given[name] = tuple(chosen(part) for part in value)
            elif name == "position_ids" and value is not None:
                given[name] = chosen(value)
        lora = self._lora.on(SlotPlaces(self._slots.gather(1, places))) if self._lora else nullcontext()
        with lora:
            try:
                made = states_of(self._layer.forward(chosen(state), **given))
            except _Taken:
                made = state.new_empty(batch, count, 0)
        return made


class _Taken(Exception):
    """Raised once the keys and values are stored: the rest of the layer is not needed."""


class _Taking:
    """A cache that stores the keys and values it is given and ends the pass."""

    def __init__(self, recursion: Recursion, places: Tensor) -> None:
        self.recursion, self.places = recursion, places

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> NoReturn:
        self.recursion.keep(keys, values, self.places)
        raise _Taken


@cache
def parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a method's arguments. Give a module class's `forward`: hooks may replace that of the object."""
    return tuple(inspect.signature(forward).parameters)[1:]


def named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name: architectures differ in which are positional."""
    return dict(zip(parameters(type(module).forward), args, strict=False)) | dict(kwargs)


def states_of(made: Any) -> Tensor:
    """The states in a decoder layer's result: some layers return a tuple that begins with them."""
    states: Tensor = made[0] if isinstance(made, tuple) else made
    return states


def _places(at: Tensor) -> Tensor:
    """The places where a mask (batch, length) is True, in order; shorter rows are filled with places outside it."""
    return at.int().argsort(dim=1, descending=True, stable=True)[:, : int(at.sum(1).max())]
