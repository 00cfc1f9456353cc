"""The notebooks: what is checked in can be read on a page; every one runs from start to end, and shows what it says."""

from __future__ import annotations

import ast
import base64
import itertools
import json
import re
from importlib import import_module
from pathlib import Path
from runpy import run_path
from statistics import fmean
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
    "in_context_gradient_descent": 6,
}
FOUND = "import json\nprint(json.dumps({}, default=vars))"
NOT_FOR_A_PAGE = {
    "a path of somebody's machine": r"(?<![\w.])/(home|root|tmp|usr|var|work|opt|mnt|Users|private)/|[A-Z]:\\",
    "a progress bar": r"\d%\|| it/s\b|\r",
    "a warning": r"Warning\b|WARNING",
    "a vector": r"(-?\d+\.\d+(e-?\d+)?(,\s*|\s{1,3}(?=\S))){12}",  # a table's columns are further apart
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
    return run_path(str(FOLDER / "execute.py"))["execute"]


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
def test_every_imported_name_exists(name: str) -> None:
    """Seconds, where running the notebooks takes minutes."""
    cells = [cell.source for cell in read(name).cells if cell.cell_type == "code"]
    code = [re.sub("^[!%].*$", "", source, flags=re.M) for source in cells]
    nodes = [node for source in code for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    for node in nodes:
        assert node.module is not None
        module = import_module(node.module)
        for each in node.names:
            assert hasattr(module, each.name) or import_module(f"{node.module}.{each.name}")
    assert nodes


@pytest.mark.parametrize("name", FIGURES)
def test_links_lead_somewhere(name: str) -> None:
    text = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    headings = {line.lstrip("# ").replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings
        elif not target.startswith("https://"):
            assert (FOLDER / target).exists()


def run(execute: Any, file: Path, found: str) -> Any:
    """What an expression is at the end of a run, which shows as many figures as before."""
    notebook = execute(file, last=FOUND.format(found))
    assert len(figures(notebook)) == FIGURES[file.stem]
    return json.loads(texts(notebook)[-1])


COSTS = "[*measured] == sorted(measured, key=lambda context: -measured[context][1])"
SCORES = "measured['full text'][0] > measured['no context'][0]"
CLAIMS = {
    "langchain_rag": [
        COSTS,
        SCORES,
        "[d.page_content for d in restore_sources(result['context'], store)]"
        " == [d.page_content for d in retriever.invoke(result['input'])]",
    ],
    "llama_index_rag": [
        COSTS,
        SCORES,
        "[n.node.get_content() for n in response.source_nodes]"
        " == [n.node.get_content() for n in index.as_retriever(similarity_top_k=1).retrieve(questions[3])]",
    ],
    "chroma_store": [
        "torch.allclose(same.slots, soft.slots, atol=2 * step)",
        "sizes['int8, 16x'] < sizes['int4, 4x'] < sizes['int8, 4x'] < sizes['fp16, 4x']",
    ],
    "what_does_a_ratio_cost": [
        "ratios == [4, 8, 16]",
        "0 < column('kl', 4).mean() < column('kl', None).mean()",
        "column('prompt_tokens', 4).mean() > column('prompt_tokens', 16).mean()",
    ],
    "train_for_your_decoder": ["report['resumed']", "history[-1]['step'] == 100", "stopped < 100"],
}
"""What a notebook says, whatever the bundle's weights, as expressions of its own names."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_notebook_says_holds(execute: Any, name: str) -> None:
    held = run(execute, FOLDER / f"{name}.ipynb", f"[bool(claim) for claim in ({', '.join(CLAIMS[name])},)]")
    assert all(held), list(zip(held, CLAIMS[name], strict=True))


LINEAR_RAG = """{
    "exact": abs(by_descent - by_attention),
    "one layer": [r.last for runs in (projection, dot_product) for r in runs.values()],
    "depth": {depth: r.last for (depth, k), r in stacked.items() if k == 25},
    "projection depth": {f"{depth}, {k}": r.last for (depth, k), r in projection_stacked.items()},
    "freedom": {name: r.last for name, r in freedom.items()},
    "range": [row for rows in by_range.values() for row in rows],
    "tables": [[[*key, runs] for key, runs in found.items()] for found in (alignments, with_teachers)],
}"""


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
def test_linear_rag(execute: Any) -> None:
    shown = run(execute, FOLDER / "in_context_gradient_descent.ipynb", LINEAR_RAG)
    check_tables(shown["tables"])
    assert shown["exact"] < 1e-9
    for one in shown["one layer"]:
        assert one["sensitivity_cosine"] > 0.98
        assert one["loss"] == pytest.approx(one["reference_loss"], rel=0.04)
    for trained, descent, halfway in shown["range"]:
        assert trained == pytest.approx(descent, rel=0.1) and halfway == pytest.approx(descent, rel=0.1)
    gap = {depth: one["reference_loss"] - one["loss"] for depth, one in shown["depth"].items()}
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
