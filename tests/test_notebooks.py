"""The tutorial notebooks: what is checked in can be read on a page, and every one runs from start to end."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
FIGURES = {
    "langchain_rag": 1,
    "llama_index_rag": 1,
    "chroma_store": 2,
    "train_for_your_decoder": 1,
    "what_does_a_ratio_cost": 2,
}
FOUND = "import json\nprint(json.dumps({}))"
NOT_FOR_A_PAGE = {
    "a path of somebody's machine": r"(?<![\w.])/(home|root|tmp|usr|var|work|opt|mnt|Users|private)/|[A-Z]:\\",
    "a progress bar": r"\d%\|| it/s\b|\r",
    "a warning": r"Warning\b|WARNING",
    "a vector": r"(-?\d+\.\d+(e-?\d+)?,?\s+){12}",
    "a secret": r"\b[0-9a-f]{64}\b",
}


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def figures(notebook: Any) -> list[bytes]:
    return [base64.b64decode(o.data["image/png"]) for o in outputs(notebook) if "image/png" in o.get("data", {})]


def texts(notebook: Any) -> list[str]:
    """Everything in the outputs that is read as text."""
    shown = []
    for output in outputs(notebook):
        kinds = output.get("data", {})
        shown += [output["text"]] if "text" in output else []
        shown += [kinds[kind] for kind in ("text/plain", "text/markdown", "text/html") if kind in kinds]
    return shown


@pytest.fixture(scope="module")
def execute() -> Any:
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.execute


@pytest.mark.parametrize("name", FIGURES)
def test_checked_in_outputs_are_those_of_one_clean_run(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {output.get("name", "stdout") for output in outputs(notebook)} == {"stdout"}
    assert len(figures(notebook)) == FIGURES[name]
    assert max(map(len, figures(notebook))) < 60_000
    for text in texts(notebook):
        assert text.count("\n") < 60 and max(map(len, text.splitlines())) < 600
        for what, pattern in NOT_FOR_A_PAGE.items():
            assert not re.search(pattern, text), f"an output shows {what}: {text}"


@pytest.mark.parametrize("name", FIGURES)
def test_links_lead_somewhere(name: str) -> None:
    text = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    headings = {line.lstrip("# ").replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings
        elif not target.startswith("https://"):
            assert (FOLDER / target).exists()


def run(execute: Any, name: str, found: str) -> tuple[Any, str]:
    """What an expression is at the end of a run, and all that the run printed; it shows as many figures as before."""
    notebook = execute(FOLDER / f"{name}.ipynb", last=FOUND.format(found))
    assert len(figures(notebook)) == FIGURES[name]
    *printed, last = texts(notebook)
    return json.loads(last), "\n".join(printed)


def check_costs_and_scores(measured: dict[str, list[float]]) -> None:
    f1, tokens = zip(*measured.values(), strict=True)
    assert [*measured][:4] == ["full text", "4x", "8x", "16x"] and [*measured][-1] == "no context"
    assert list(tokens) == sorted(tokens, reverse=True) and tokens[0] > 3 * tokens[3]
    assert min(f1[0], f1[1]) > f1[-1]


def test_langchain(execute: Any) -> None:
    sources = "[d.page_content for d in {}]"
    restored = sources.format("restore_sources(result['context'], store)")
    retrieved = sources.format("retriever.invoke(questions[0])")
    found, _ = run(execute, "langchain_rag", f"[measured, {restored}, {retrieved}]")
    check_costs_and_scores(found[0])
    assert found[1] == found[2] and len(found[1]) == 2


def test_llama_index(execute: Any) -> None:
    sources = "[n.node.get_content() for n in {}]"
    shown, retrieved = (
        sources.format(f"{each}.query(questions[0]).source_nodes") for each in ("soft_engine", "engine")
    )
    found, _ = run(execute, "llama_index_rag", f"[measured, {shown}, {retrieved}]")
    check_costs_and_scores(found[0])
    assert found[1] == found[2] and len(found[1]) == 2


def test_chroma(execute: Any) -> None:
    sizes, printed = run(execute, "chroma_store", "sizes")
    reports = re.findall(r"AddReport\(added=(\d+), updated=(\d+), unchanged=(\d+)\)", printed)
    every, nothing = ("40", "0", "0"), ("0", "0", "40")
    assert reports == [every, nothing, ("0", "1", "0"), ("0", "1", "0"), every, nothing]
    assert "the same slots as in the folder: True" in printed
    assert re.search(r"were made by bundle .* cannot read them", printed)  # another one is refused
    assert sizes["int8, 16x"] < sizes["int8, 4x"] < sizes["fp16, 4x"]


def test_cost_of_a_ratio(execute: Any) -> None:
    columns = "{str(r): [float(column(name, r).mean()) for name in ('f1', 'kl')] for r in [*ratios, None]}"
    found, printed = run(execute, "what_does_a_ratio_cost", columns)
    f1, kl = zip(*found.values(), strict=True)
    assert f1[0] > f1[-2] and kl[0] < kl[-2] and f1[0] > f1[-1] and kl[0] < kl[-1]
    assert f"{'soft context 4x'} | " in printed and "    full text: " in printed


@pytest.mark.slow
def test_training(execute: Any) -> None:
    found, printed = run(
        execute, "train_for_your_decoder", "[report['resumed'], history, [[s.system, s.ratio] for s in scores]]"
    )
    resumed, history, scores = found
    assert resumed and "stopped at step" in printed
    steps = [row["step"] for row in history]
    assert steps == sorted(set(steps)) and steps[-1] == 100
    assert scores[:3] == [["full text", None], ["no context", None], ["soft context", 2]]
