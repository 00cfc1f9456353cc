"""Caches whose rows come and go."""

import pytest
import torch
from transformers import DynamicCache

from ctx_compress_rag.models.transformers_internals import cut_kv_cache, join_kv_caches


def cache_of(rows: int, length: int, heads: int = 2) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        heads_here = heads if layer else 2
        cache.update(torch.rand(rows, heads_here, length, 4), torch.rand(rows, heads_here, length, 4), layer)
    return cache


def tensors(cache: DynamicCache) -> list[torch.Tensor]:
    return [each for layer in cache.layers for each in (layer.keys, layer.values) if each is not None]


def test_a_join_that_fails_half_way_is_undone() -> None:
    cache, unfit = cache_of(2, 3), cache_of(1, 5, heads=3)  # its second layer does not fit
    old = tensors(cache)
    with pytest.raises(RuntimeError):
        join_kv_caches(cache, unfit, 5)
    cut_kv_cache(cache, slice(2), -3)
    assert all(torch.equal(now, one) for now, one in zip(tensors(cache), old, strict=True))
