"""The private names of transformers that this library needs, each with the reason; `transformers<6` bounds them."""

import inspect
from typing import Any

import torch
from torch import Tensor

_KEPT_BY_POSITION = {"full_attention", "sliding_attention"}


def hub_commit(config: Any) -> str:
    """Return the commit on the hub that a config was loaded from, or ""; `revision` may be a branch, which moves."""
    return str(getattr(config, "_commit_hash", None) or "")


def set_hub_commit(config: Any, commit: str | None) -> None:
    """Record the commit that `hub_commit` returns, for a config whose model was not loaded from the hub."""
    config._commit_hash = commit


def can_share_cache(model: Any) -> bool:
    """Whether a cache holds keys and values by position, so that prompts can join and leave a running batch."""
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ())
    shared = getattr(config, "num_kv_shared_layers", None)
    # `_is_stateful` is the only sign of a cache that is a state of the whole text, such as Mamba's.
    return types <= _KEPT_BY_POSITION and not shared and not getattr(model, "_is_stateful", False)


def cache_argument(model: Any) -> str:
    """Return the argument name of the cache in a causal LM's `forward`: transformers 5.24 renamed `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


# A DynamicCache can select rows, but not join others or drop positions: the tensors of its layers are replaced.


def cut_kv_cache(cache: Any, rows: Tensor | slice, start: int) -> None:
    """Keep, in place, only these rows (prompts) of a DynamicCache, and only their positions from `start` on."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[rows, :, start:], layer.values[rows, :, start:]


def join_kv_caches(cache: Any, new: Any, length: int) -> None:
    """Pad two DynamicCaches on the left to `length` positions, and append the second's rows (prompts) to the first.

    If memory runs out, only some layers have the new rows; `cut_kv_cache` then removes them.
    """
    for mine, other in zip(cache.layers, new.layers, strict=True):
        keys = torch.cat([pad_left(mine.keys, length, 2), pad_left(other.keys, length, 2)])
        values = torch.cat([pad_left(mine.values, length, 2), pad_left(other.values, length, 2)])
        mine.keys, mine.values = keys, values


def pad_left(x: Tensor, length: int, dim: int) -> Tensor:
    """Return `x` with zeros before it along `dim`, so that it has the length `length` there."""
    missing = length - x.shape[dim]
    if not missing:
        return x
    shape = [*x.shape]
    shape[dim] = missing
    return torch.cat([x.new_zeros(shape), x], dim)
