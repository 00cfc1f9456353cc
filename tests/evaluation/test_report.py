"""What every table and picture of scores is written by."""

from __future__ import annotations

from statistics import mean, stdev

from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.statistics import Interval


def test_a_table_has_the_columns_of_all_rows() -> None:
    assert report.table([{"a": "1", "b": "2"}, {"a": "3", "c": "4"}]).splitlines() == [
        "| a | b | c |",
        "|---|---|---|",
        "| 1 | 2 |  |",
        "| 3 |  | 4 |",
    ]


def test_numbers_have_their_errors() -> None:
    values = [0.0, 0.5, 1.0, 1.0]
    assert report.mean(values) == f"{mean(values):.3f} ± {stdev(values) / 2:.3f}"
    assert report.mean([0.25]) == "0.250"
    found = Interval(0.1, -0.05, 0.25)
    assert report.interval(found) == "0.100 (-0.050 to 0.250)"
    assert report.interval(found, "+") == "+0.100 (-0.050 to +0.250)"
    assert report.interval(None) == report.times(None) == ""
    assert (report.times(16), report.times(6.4)) == ("16x", "6.4x")


def test_error_bars_of_scores_stay_between_0_and_1() -> None:
    curve = report.curve("soft", [(4, 0.9, 0.2), (8, 0.5, 0.1), (16, 0.1, 0.2)])
    assert (curve.ratios, curve.scores) == ((4, 8, 16), (0.9, 0.5, 0.1))
    assert (curve.low, curve.high) == ([0.9 - 0.2, 0.4, 0.0], [1.0, 0.6, 0.1 + 0.2])
