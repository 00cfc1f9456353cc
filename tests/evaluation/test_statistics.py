"""Standard errors and intervals against plain computations."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_compress_rag.evaluation.statistics import standard_error, teacher_normalized


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_standard_error_is_that_of_the_mean(scores: list[float]) -> None:
    assert standard_error(scores) == pytest.approx(statistics.stdev(scores) / math.sqrt(len(scores)), abs=1e-12)


@settings(deadline=None)
@given(st.floats(0, 1), st.lists(st.integers(1, 4), min_size=5, max_size=20))
def test_a_share_kept_of_every_question_has_an_exact_interval(share: float, worth: list[int]) -> None:
    """If each question keeps the same share, so does each resample: only pairing makes this hold."""
    nothing = [0.1] * len(worth)
    full = [0.1 + w / 5 for w in worth]
    compressed = [0.1 + share * w / 5 for w in worth]
    interval = teacher_normalized(compressed, nothing, full)
    assert interval is not None
    assert (interval.value, interval.low, interval.high) == pytest.approx((share, share, share))


def test_interval_matches_the_delta_method() -> None:
    """A first-order approximation of the ratio's spread, by other mathematics than resampling."""
    rng = np.random.default_rng(7)
    n = 800
    nothing = rng.binomial(1, 0.1, n).astype(float)
    full = rng.binomial(1, 0.9, n).astype(float)
    compressed = np.where(rng.random(n) < 0.7, full, nothing)
    interval = teacher_normalized(compressed.tolist(), nothing.tolist(), full.tolist())
    assert interval is not None
    gain, worth = compressed - nothing, full - nothing
    ratio = gain.mean() / worth.mean()
    spread = 1.96 * np.std(gain - ratio * worth, ddof=1) / math.sqrt(n) / worth.mean()
    assert interval.value == pytest.approx(ratio)
    assert interval.low == pytest.approx(ratio - spread, abs=0.15 * spread)
    assert interval.high == pytest.approx(ratio + spread, abs=0.15 * spread)


@pytest.mark.parametrize(
    ("nothing", "full"),
    [
        ([0.5] * 10, [0.5] * 10),  # the text gains nothing
        ([0.6] * 10, [0.5] * 10),  # less than nothing
        ([0.0, 1.0] * 5, [1.0, 0.0] * 4 + [1.0, 1.0]),  # better by one question of ten: chance
    ],
)
def test_no_share_of_a_worth_that_is_not_sure(nothing: list[float], full: list[float]) -> None:
    assert teacher_normalized([0.5] * 10, nothing, full) is None
