"""SoftContext: the matrix of vectors that stands for a passage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctx_compress_rag.errors import ConfigError, RatioError


@dataclass(frozen=True, eq=False)
class SoftContext:
    """A compressed passage, in the compressor's own space (before the reader's projection).

    Attributes:
        slots: float tensor (slots, dim), on the CPU.
        token_counts: int64 tensor (slots,): how many source tokens each slot stands for.
    """

    slots: Tensor
    token_counts: Tensor

    def __post_init__(self) -> None:
        if self.slots.ndim != 2 or self.token_counts.shape != self.slots.shape[:1]:
            raise ConfigError(
                f"a SoftContext needs slots (S, D) and token_counts (S,), got {tuple(self.slots.shape)} "
                f"and {tuple(self.token_counts.shape)}"
            )

    @property
    def n_slots(self) -> int:
        """Number of slots."""
        return self.slots.shape[0]

    @property
    def n_tokens(self) -> int:
        """Number of source tokens that the whole context stands for."""
        return int(self.token_counts.sum())

    def merge(self, factor: int) -> SoftContext:
        """Merge each run of `factor` neighboring slots into their mean, weighted by source tokens.

        For mean pooling this equals pooling the hidden states at `factor` times the ratio (Simple
        Context Compression, eq. 3-4), because a mean of disjoint blocks is the weighted mean of their means.

        Shape: (S, D) -> (ceil(S / factor), D)
        """
        if factor < 1:
            raise RatioError(f"factor={factor}: give 1 or more slots to merge into one")
        if factor == 1:
            return self
        pooled, counts = pool(self.slots, self.token_counts, factor)
        return SoftContext(pooled, counts)


def pool(vectors: Tensor, weights: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Weighted mean over consecutive, non-overlapping windows (Simple Context Compression, eq. 3-4).

    Positions of weight 0 (padding) do not count; a window of only padding gives a zero vector of
    weight 0. Sums are at least float32: in float16, sums over 128 tokens overflow.

    Shape: vectors (..., L, D), weights (..., L) -> (..., ceil(L / window), D), (..., ceil(L / window))
    """
    length = vectors.shape[-2]
    blocks = -(-length // window)
    padding = blocks * window - length
    dtype = vectors.dtype
    wide = vectors.to(torch.promote_types(dtype, torch.float32))
    wide = torch.nn.functional.pad(wide * weights.unsqueeze(-1), (0, 0, 0, padding))
    weights = torch.nn.functional.pad(weights, (0, padding))
    sums = wide.unflatten(-2, (blocks, window)).sum(-2)
    counts = weights.unflatten(-1, (blocks, window)).sum(-1)
    return (sums / counts.clamp(min=1).unsqueeze(-1)).to(dtype), counts


def merge_factor(ratio: int, base: int, *, nestable: bool = True) -> int:
    """How many slots, stored at `base` source tokens each, become one at `ratio`; RatioError if none do."""
    if ratio < base or ratio % base:
        raise RatioError(f"ratio {ratio} cannot be made from slots stored at {base}: choose a multiple of {base}")
    if ratio != base and not nestable:
        raise RatioError(
            f"ratio {ratio} cannot be made: this method's slots cannot be merged, and here they are stored at {base}: "
            f"use ratio={base}, or index again at {ratio}"
        )
    return ratio // base


def check_window(ratio: int, window: int) -> None:
    """Raise a RatioError for a ratio that does not divide an encoder's window."""
    if ratio < 1 or window % ratio:
        raise RatioError(f"ratio {ratio} does not divide the encoder's window of {window} tokens")
