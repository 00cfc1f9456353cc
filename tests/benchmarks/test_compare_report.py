"""What the report of a comparison says of scores: intervals, methods shown, orderings; and its control."""

import math

import numpy as np
import pytest

from benchmarks.compare.config import Comparison, Ordering
from benchmarks.compare.report import Cell, EntryRow, Results, methods_shown, orderings
from benchmarks.scoring.paired import paired_difference

COUNT = 40
CLAIMS = Comparison.model_construct(
    orderings=[
        Ordering(claim="the first claim", better="pooled", worse="coarse"),
        Ordering(claim="the second claim", better="pooled", worse="tokens"),
    ]
)


def scored(
    entries: dict[str, dict[int, list[float]]], none: list[float] | None = None, control: list[float] | None = None
) -> Results:
    """Results with these F1 scores of entries at ratios, without context, and with another question's slots."""
    none, control = none or [0.0] * COUNT, control or [0.0] * COUNT

    def row(name: str, by_ratio: dict[int, list[float]]) -> EntryRow:
        cells = {ratio: Cell(f1, f1, None, 64 / ratio, ratio, 8.0) for ratio, f1 in by_ratio.items()}
        return EntryRow(name, "mean_pooling", cells, {"interrupted": False}, control)

    full = [1.0] * COUNT
    return Results({}, full, none, full, none, [row(*entry) for entry in entries.items()], [])


def test_pairing_narrows_the_interval() -> None:
    """Two systems with the same hard questions, one a little better at each: sure, however spread the scores are."""
    rng = np.random.default_rng(0)
    hard = rng.random(50) * 0.9
    found = paired_difference((hard + 0.05).tolist(), hard.tolist())
    assert (found.low, found.value, found.high) == pytest.approx((0.05, 0.05, 0.05))


def test_orderings_say_what_held() -> None:
    rng = np.random.default_rng(1)
    low, high = (rng.random(COUNT) * 0.3).tolist(), (0.6 + rng.random(COUNT) * 0.3).tolist()
    noise = rng.permutation([0.0, 1.0] * (COUNT // 2)).tolist()
    for coarse, verdict in ((low, "held"), (high, "not shown"), ([1.0] * COUNT, "reversed")):
        first, second = orderings(CLAIMS, scored({"pooled": {4: noise, 8: high}, "coarse": {8: coarse}}))
        assert first.startswith(f"- **{verdict}**: the first claim: pooled over coarse at 8x ")
        assert f"{np.mean(high) - np.mean(coarse):+.3f} (" in first
        assert second == "- **not measured**: the second claim (tokens has no result)"
    line = orderings(CLAIMS, scored({"pooled": {4: noise, 8: high}, "tokens": {4: low, 8: low}}))[1]
    fours, eights = np.mean(noise) - np.mean(low), np.mean(high) - np.mean(low)
    assert f"pooled over tokens {(fours + eights) / 2:+.3f} (" in line
    assert f"; 4x {fours:+.3f} (" in line and f", 8x {eights:+.3f} (" in line


def test_a_method_is_shown_by_three_standard_errors() -> None:
    """No context and other passages answer nothing here, so that a gain is the score itself."""
    rng = np.random.default_rng(2)
    for error, verdict in ((2.9, "not shown"), (3.1, "shown")):
        scores = rng.random(COUNT)
        scores += error * np.std(scores, ddof=1) / math.sqrt(COUNT) - scores.mean()
        gain = f"{scores.mean():+.3f} ± "
        found = scored({"pooled": {4: scores.tolist(), 8: [1.0] * COUNT}, "coarse": {8: [0.0] * COUNT}})
        first, second = methods_shown(found)
        assert first.startswith(f"- **{verdict}**: pooled at 4x: over no context {gain}")
        assert f"over another passage {gain}" in first
        assert second.startswith("- **not shown**: coarse at 8x: over no context +0.000 ")
