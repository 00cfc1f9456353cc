"""Compute how certain scores are, by standard errors and 95 % percentile-bootstrap intervals.

The bootstrap draws questions and keeps all scores of a question together, so questions that are hard for every system
do not widen an interval. The draws are the same at every call.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.errors import DataError

_TAIL = 0.025
_RESAMPLES = 2000
_SEED = 0


def standard_error(scores: Sequence[float]) -> float:
    """Return the standard error of the mean of scores, one per question; raise DataError for fewer than two."""
    if len(scores) < 2:
        raise DataError(f"a standard error needs two scores or more, got {len(scores)}")
    return float(np.std(scores, ddof=1) / np.sqrt(len(scores)))


@dataclass(frozen=True)
class ConfidenceInterval:
    """A score with the bounds of its confidence interval."""

    value: float
    low: float
    high: float


def teacher_normalized(
    compressed: Sequence[float], no_context: Sequence[float], full_text: Sequence[float]
) -> ConfidenceInterval | None:
    """Return the share of the gain from full text that compression keeps (Simple Context Compression, section 5.1).

    The share is (compressed - no context) / (full text - no context), where each is the mean of any score over the same
    questions in the same order, answered by the same decoder. None if the full text is not significantly better than no
    context (at the interval's confidence level), because there is then no gain to take a share of.
    """
    whole, means = _resampled(compressed, no_context, full_text)
    gain, worth = means[:, 0] - means[:, 1], means[:, 2] - means[:, 1]
    if whole[2] <= whole[1] or np.mean(worth <= 0) > _TAIL:
        return None
    share = (whole[0] - whole[1]) / (whole[2] - whole[1])
    low, high = np.quantile(gain[worth > 0] / worth[worth > 0], [_TAIL, 1 - _TAIL])
    return ConfidenceInterval(float(share), float(low), float(high))


def _resampled(*systems: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each system's mean (systems,), and its means over resampled questions (resamples, systems)."""
    lengths = [len(scores) for scores in systems]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise DataError(f"the systems need scores of the same questions, got {lengths} scores")
    scores, rng = np.array(systems, dtype=np.float64), np.random.default_rng(_SEED)
    draws = (rng.integers(lengths[0], size=lengths[0]) for _ in range(_RESAMPLES))
    return scores.mean(axis=1), np.stack([scores[:, draw].mean(axis=1) for draw in draws])
