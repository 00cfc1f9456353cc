"""Four ways to put the columns of a table on one scale (In-Context Optimization, section 4.3, appendix D)."""

from collections.abc import Callable

import torch
from torch import Tensor

Normalizer = Callable[[Tensor], Tensor]
"""Maps rows to normalized rows, each column separately: (..., d) -> (..., d)."""


def z_score(rows: Tensor) -> Normalizer:
    """Return the map (x - mean) / standard deviation of `rows`, shape (n, d). A constant column becomes 0."""
    mean, deviation = rows.mean(dim=0), rows.std(dim=0, correction=0)
    return lambda x: (x - mean) / torch.where(deviation > 0, deviation, 1)


def min_max(rows: Tensor) -> Normalizer:
    """Return a map of the range of `rows`, shape (n, d), to 0 to 1; others may exceed it. Constant columns become 0."""
    low, high = rows.amin(dim=0), rows.amax(dim=0)
    return lambda x: (x - low) / torch.where(high > low, high - low, 1)


def rank(rows: Tensor) -> Normalizer:
    """Return a map to the share of `rows`, shape (n, d), with a smaller value, 0 to 1; equal values count half."""
    columns = rows.T.sort(dim=1).values.contiguous()

    def normalize(x: Tensor) -> Tensor:
        values = x.reshape(-1, x.shape[-1]).T.contiguous()
        smaller, not_larger = (torch.searchsorted(columns, values, right=right) for right in (False, True))
        return ((smaller + not_larger) / (2 * columns.shape[1])).T.reshape(x.shape)

    return normalize


def tanh(rows: Tensor) -> Normalizer:
    """Return the tanh of the z-score, -1 to 1, as a map. The paper gives no formula."""
    score = z_score(rows)
    return lambda x: score(x).tanh()


NORMALIZATIONS: dict[str, Callable[[Tensor], Normalizer]] = {
    "z-score": z_score,
    "min-max": min_max,
    "rank": rank,
    "tanh": tanh,
}
