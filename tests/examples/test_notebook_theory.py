"""The notebook on linear RAG runs and still shows what it says (what is checked in: tests/test_notebooks.py)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "in_context_gradient_descent.ipynb"
LAST = """
import json
from dataclasses import asdict
print(json.dumps({
    "exact": abs(by_descent - by_attention),
    "projection": [asdict(r.last) for r in projection.values()],
    "dot product": [asdict(r.last) for r in dot_product.values()],
    "depth": {str(depth): asdict(r.last) for (depth, k), r in stacked.items() if k == 25},
    "projection depth": {f"{depth}, {k}": asdict(r.last) for (depth, k), r in projection_stacked.items()},
    "freedom": {name: asdict(r.last) for name, r in freedom.items()},
    "range": by_range,
}))
"""


TABLES = """
import json
from dataclasses import asdict
print(json.dumps([
    [[*key, [asdict(a) for a in runs]] for key, runs in found.items()] for found in (alignments, with_teachers)
]))
"""


def mean(runs: list[Any], name: str) -> float:
    return fmean(run["features"][name] for run in runs)


def check_tables(shown: list[Any]) -> None:
    """What the section on tables says of its two tables of results."""
    own, teachers = ({(name, kind): runs for name, kind, runs in rows} for rows in shown)
    for runs in own.values():
        of_others = fmean(run["shuffled_loss"] for run in runs)
        assert mean(runs, "loss") < mean(runs, "reference_loss") and of_others - mean(runs, "loss") < 0.1
        assert fmean(run["inputs"]["sensitivity_cosine"] for run in runs) < 0.6
    shares = sorted(mean(runs, "loss") / mean(runs, "reference_loss") for runs in own.values())
    assert shares[len(shares) // 2 - 1] < 0.8  # half of them
    for near, far in itertools.product(("z-score", "tanh"), ("min-max", "rank")):
        distances = [mean(own["Friedman", kind], "prediction_difference") for kind in (near, far)]
        assert distances[0] < 0.8 * distances[1]
    cosines = {key: mean(runs, "sensitivity_cosine") for key, runs in teachers.items()}
    assert min(cosines["Friedman", "min-max"], cosines["Friedman", "rank"]) > 0.8
    tail = {kind: cosine for (name, kind), cosine in cosines.items() if name == "Friedman, skewed"}
    assert max(tail["min-max"], tail["z-score"]) < 0.7 < min(tail["tanh"], tail["rank"])


@pytest.mark.slow
def test_runs_from_start_to_end_and_shows_what_it_says() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(LAST), nbformat.v4.new_code_cell(TABLES)]
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 6
    check_tables(json.loads(outputs[-1].text))
    shown = json.loads(outputs[-2].text)
    assert shown["exact"] < 1e-9
    for run in [*shown["projection"], *shown["dot product"]]:
        assert run["sensitivity_cosine"] > 0.98
        assert run["loss"] == pytest.approx(run["reference_loss"], rel=0.04)
    for rows in shown["range"].values():
        for trained, descent, halfway in rows:
            assert trained == pytest.approx(descent, rel=0.1) and halfway == pytest.approx(descent, rel=0.1)
    gap = {depth: run["reference_loss"] - run["loss"] for depth, run in shown["depth"].items()}
    assert gap["2"] > 2 * gap["5"] > 0
    projection = shown["projection depth"]
    for k in (2, 10):
        shallow, deep = projection[f"2, {k}"], projection[f"5, {k}"]
        assert deep["prediction_difference"] < 0.85 * shallow["prediction_difference"]
        assert deep["sensitivity_distance"] < 0.8 * shallow["sensitivity_distance"]
        assert 0.98 < shallow["sensitivity_cosine"] < deep["sensitivity_cosine"]
    for depth in (2, 5):
        few, many = projection[f"{depth}, 2"], projection[f"{depth}, 10"]
        assert few["prediction_difference"] < many["prediction_difference"]
        assert few["loss"] < few["reference_loss"] and many["loss"] > many["reference_loss"]
    freedom = shown["freedom"]
    assert freedom["lemma"]["loss"] == pytest.approx(freedom["lemma"]["reference_loss"], rel=0.02)
    assert freedom["all"]["loss"] < 0.9 * freedom["writes y"]["loss"] < 0.9 * freedom["lemma"]["loss"]
