"""The soft context of a passage, and the merging of its slots to coarser ratios."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.errors import ConfigError, RatioError


@dataclass(frozen=True, eq=False)
class SoftContext:
    """The slots of a passage, in the compressor's own space (before the reader's projection).

    Attributes:
        slots: float32 array (slots, dim).
        token_counts: int64 array (slots,), the number of source tokens that each slot stands for.
    """

    slots: NDArray[np.float32]
    token_counts: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.slots.ndim != 2 or self.token_counts.shape != self.slots.shape[:1]:
            raise ConfigError(
                f"a SoftContext needs slots (S, D) and token_counts (S,), got {self.slots.shape} "
                f"and {self.token_counts.shape}"
            )

    @property
    def n_slots(self) -> int:
        """Number of slots."""
        return len(self.slots)

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
        starts = np.arange(0, self.n_slots, factor)
        counts = np.add.reduceat(self.token_counts, starts)
        sums = np.add.reduceat(self.slots * self.token_counts[:, None].astype(np.float32), starts)
        return SoftContext((sums / counts.clip(min=1)[:, None]).astype(np.float32), counts)


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
        raise RatioError(f"ratio {ratio} does not divide the encoder's window of {window} tokens: choose one that does")
