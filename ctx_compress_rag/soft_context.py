"""The soft context of a passage, and the merging of its slots to coarser ratios."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctx_compress_rag.errors import ConfigError, RatioError


@dataclass(frozen=True, eq=False)
class SoftContext:
    """The slots of a passage, in the compressor's own space (before the reader's projection).

    Attributes:
        slots: float tensor (slots, dim), on the CPU.
        token_counts: int64 tensor (slots,), the number of source tokens that each slot stands for.
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
        """Number of source tokens that all slots together stand for."""
        return int(self.token_counts.sum())

    def merge(self, factor: int) -> SoftContext:
        """Return a soft context with each `factor` neighboring slots merged into their mean, weighted by token counts.

        For mean pooling this equals pooling the hidden states at `factor` times the ratio (Simple
        Context Compression, eq. 3-4), because a mean of disjoint blocks is the weighted mean of their means.

        Shape: (S, D) -> (ceil(S / factor), D). Raises RatioError if `factor` is below 1.
        """
        if factor < 1:
            raise RatioError(f"factor={factor}: give 1 or more slots to merge into one")
        if factor == 1:
            return self
        pooled, counts = mean_pool_slots(self.slots, self.token_counts, factor)
        return SoftContext(pooled, counts)


def mean_pool_slots(vectors: Tensor, weights: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return the weighted mean and the weight of each window of vectors (Simple Context Compression, eq. 3-4).

    Windows do not overlap. Positions of weight 0 (padding) do not count. A window of only padding gives a zero
    vector of weight 0. Sums are at least float32, because in float16 sums over 128 tokens overflow.

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
    """Return how many slots stored at the ratio `base` are merged into one at `ratio`.

    Raises RatioError if `ratio` is not a multiple of `base`, or if slots had to be merged and are not `nestable`.
    """
    if ratio < base or ratio % base:
        raise RatioError(f"ratio {ratio} cannot be made from slots stored at {base}: choose a multiple of {base}")
    if ratio != base and not nestable:
        raise RatioError(
            f"ratio {ratio} cannot be made: this method's slots cannot be merged, and here they are stored at {base}: "
            f"use ratio={base}, or index again at {ratio}"
        )
    return ratio // base


def check_ratio_divides_window(ratio: int, window: int) -> None:
    """Raise RatioError if a ratio does not divide an encoder's window (in tokens)."""
    if ratio < 1 or window % ratio:
        raise RatioError(f"ratio {ratio} does not divide the encoder's window of {window} tokens")
