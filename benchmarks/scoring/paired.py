"""Differences between systems that answered the same questions."""

from collections.abc import Sequence

import numpy as np

from ctx_compress_rag.evaluation.report import ConfidenceInterval

_RESAMPLES = 2000


def paired_difference(first: Sequence[float], second: Sequence[float]) -> ConfidenceInterval:
    """How much better the first system is: the difference of means, with its 95 % percentile-bootstrap interval.

    The bootstrap draws questions, so that hard questions, on which both score low, do not widen the interval. The draws
    are the same at every call.

    Args:
        first: score of each question with the first system.
        second: score of the same questions, in the same order, with the second.
    """
    differences = np.subtract(first, second)
    draws = np.random.default_rng(0).integers(len(differences), size=(_RESAMPLES, len(differences)))
    low, high = np.quantile(differences[draws].mean(axis=1), [0.025, 0.975])
    return ConfidenceInterval(float(differences.mean()), float(low), float(high))
