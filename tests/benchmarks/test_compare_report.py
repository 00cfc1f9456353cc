"""What the report of a comparison says of scores: intervals, methods shown, orderings; and its control."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.compare.config import Comparison
from benchmarks.compare.control import with_other_passages
from benchmarks.compare.report import methods_shown, orderings, read_report
from benchmarks.scoring.paired import paired_difference
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.evaluation.questions import Question

ENTRY = {"note": "", "method": {"name": "mean_pooling"}, "stages": [{"share": 1, "stage": "answer"}]}


def comparison() -> Comparison:
    """Two claims of three entries, whose scores `written` gives."""
    return Comparison.model_validate(
        {
            "ratios": [4, 8],
            "batch_size": 2,
            "data": {"files": ["train.jsonl"], "test": "test.jsonl"},
            "decoder": "decoder",
            "settings": {},
            "entries": {"pooled": ENTRY, "coarse": ENTRY | {"ratios": [8]}, "tokens": ENTRY},
            "orderings": [
                {"claim": "the first claim", "better": "pooled", "worse": "coarse"},
                {"claim": "the second claim", "better": "pooled", "worse": "tokens"},
            ],
        }
    )


def test_pairing_narrows_the_interval() -> None:
    """Two systems with the same hard questions, one a little better at each: sure, however spread the scores are."""
    rng = np.random.default_rng(0)
    hard = rng.random(50) * 0.9
    found = paired_difference((hard + 0.05).tolist(), hard.tolist())
    assert (found.low, found.value, found.high) == pytest.approx((0.05, 0.05, 0.05))


def written(
    folder: Path,
    scores: dict[str, dict[int, list[float]]],
    guessed: list[float] | None = None,
) -> Path:
    """A comparison's folder with these F1 scores: entries' at ratios, and without context or with another's."""
    count = 40
    (folder / "results").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"steps": 4, "questions": count, "passages": 1}))

    def row(system: str, ratio: int | None, f1: list[float], tokens: float) -> dict[str, Any]:
        return {
            "system": system, "ratio": ratio, "f1": f1, "exact_match": f1, "prompt_tokens": tokens, "stored_bytes": 8.0
        }  # fmt: skip

    whole = [row("full text", None, [1.0] * count, 74.0), row("no context", None, guessed or [0.0] * count, 10.0)]
    whole.append(row("truncation", 8, [0.5, 0.0] * 20, 18.0))
    (folder / "results" / "baselines.json").write_text(json.dumps({"name": "baselines", "scores": whole}))
    for name, by_ratio in scores.items():
        rows = [row("soft context", ratio, f1, 10 + 64 / ratio) for ratio, f1 in by_ratio.items()]
        result = {
            "method": {"name": "mean_pooling"}, "scores": rows, "trained_parameters": 1, "training_seconds": 1.0,
            "training_tokens": 1, "compress_seconds": 1.0, "interrupted": False,
            "another_passage": {"f1": guessed or [0.0] * count},
        }  # fmt: skip
        (folder / "results" / f"{name}.json").write_text(json.dumps(result))
    return folder


def test_orderings_say_what_held(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    low, high = (rng.random(40) * 0.3).tolist(), (0.6 + rng.random(40) * 0.3).tolist()
    noise = rng.permutation([0.0, 1.0] * 20).tolist()
    for coarse, verdict in ((low, "held"), (high, "not shown"), ([1.0] * 40, "reversed")):
        folder = written(tmp_path / verdict, {"pooled": {4: noise, 8: high}, "coarse": {8: coarse}})
        first, second = orderings(comparison(), read_report(comparison(), folder))
        assert first.startswith(f"- **{verdict}**: the first claim: pooled over coarse at 8x ")
        assert f"{np.mean(high) - np.mean(coarse):+.3f} (" in first
        assert second == "- **not measured**: the second claim (tokens has no result)"
    folder = written(tmp_path / "both", {"pooled": {4: noise, 8: high}, "tokens": {4: low, 8: low}})
    line = orderings(comparison(), read_report(comparison(), folder))[1]
    fours, eights = np.mean(noise) - np.mean(low), np.mean(high) - np.mean(low)
    assert f"pooled over tokens {(fours + eights) / 2:+.3f} (" in line
    assert f"; 4x {fours:+.3f} (" in line and f", 8x {eights:+.3f} (" in line
    # Always a little more, where neither reads its slots: the decoder guesses as much without them.
    more = [value + 0.02 for value in low]
    guessing = written(tmp_path / "guessing", {"pooled": {8: more}, "coarse": {8: low}}, rng.permutation(low).tolist())
    line = orderings(comparison(), read_report(comparison(), guessing))[0]
    assert line.startswith("- **not shown**") and "at 8x +0.020 (+" in line


def test_a_method_is_shown_by_three_standard_errors(tmp_path: Path) -> None:
    """No context and other passages answer nothing here, so that a gain is the score itself."""
    rng = np.random.default_rng(2)
    for error, verdict in ((2.9, "not shown"), (3.1, "shown")):
        scores = rng.random(40)
        scores += error * np.std(scores, ddof=1) / math.sqrt(40) - scores.mean()
        gain = f"{scores.mean():+.3f} ± "
        folder = written(tmp_path / verdict, {"pooled": {4: scores.tolist(), 8: [1.0] * 40}, "coarse": {8: [0.0] * 40}})
        first, second = methods_shown(read_report(comparison(), folder))
        assert first.startswith(f"- **{verdict}**: pooled at 4x: over no context {gain}")
        assert f"over another passage {gain}" in first
        assert second.startswith("- **not shown**: coarse at 8x: over no context +0.000 ")


def test_other_passages_are_real_ones_without_the_answer() -> None:
    """Of the next question that has some; without any, the comparison is refused."""
    anna, bert, ship = "Anna was born in Bonn.", "Bert lives in Rome.", "The Anna sails to Bonn."
    asked = [
        Question((anna,), "Where?", ("Bonn",)),
        Question((anna, ship), "Where?", ("Bonn", "Rome")),
        Question((bert,), "Who?", ("Bert",)),
        Question((ship, "Carl met Bert."), "Who?", ("Carl",)),
    ]
    with pytest.raises(DataError, match="no question has passages that do not answer 'Where"):
        with_other_passages(asked)
    asked[1] = Question((anna, ship), "Where?", ("Bonn",))
    moved = with_other_passages(asked)
    assert [(q.question, q.answers) for q in moved] == [(q.question, q.answers) for q in asked]
    assert [q.passages for q in moved] == [(bert,), (bert,), (anna,), (anna,)]
