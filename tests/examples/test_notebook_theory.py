"""The notebook on linear RAG: what is checked in, and, slowly, that it runs and still shows what it says."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "in_context_gradient_descent.ipynb"
FIGURES = 3
LAST = """
import json
from dataclasses import asdict
print(json.dumps({
    "exact": abs(by_descent - by_attention),
    "projection": [asdict(r.last) for r in projection.values()],
    "dot product": [asdict(r.last) for r in dot_product.values()],
    "depth": {str(depth): asdict(r.last) for (depth, k), r in stacked.items() if k == 25},
    "freedom": {name: asdict(r.last) for name, r in freedom.items()},
    "range": by_range,
}))
"""


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def figures(notebook: Any) -> list[bytes]:
    return [base64.b64decode(o.data["image/png"]) for o in outputs(notebook) if "image/png" in o.get("data", {})]


def test_checked_in_outputs_are_those_of_one_clean_run() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {output.get("name", "stdout") for output in outputs(notebook)} == {"stdout"}
    assert len(figures(notebook)) == FIGURES
    assert max(map(len, figures(notebook))) < 60_000


@pytest.mark.slow
def test_runs_from_start_to_end_and_shows_what_it_says() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(LAST))
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert len(figures(notebook)) == FIGURES
    shown = json.loads(outputs(notebook)[-1].text)
    assert shown["exact"] < 1e-9
    for run in [*shown["projection"], *shown["dot product"]]:
        assert run["sensitivity_cosine"] > 0.98
        assert run["loss"] == pytest.approx(run["reference_loss"], rel=0.04)
    for rows in shown["range"].values():
        for trained, descent, halfway in rows:
            assert trained == pytest.approx(descent, rel=0.1) and halfway == pytest.approx(descent, rel=0.1)
    gap = {depth: run["reference_loss"] - run["loss"] for depth, run in shown["depth"].items()}
    assert gap["2"] > 2 * gap["5"] > 0
    freedom = shown["freedom"]
    assert freedom["lemma"]["loss"] == pytest.approx(freedom["lemma"]["reference_loss"], rel=0.02)
    assert freedom["all"]["loss"] < 0.9 * freedom["writes y"]["loss"] < 0.9 * freedom["lemma"]["loss"]
