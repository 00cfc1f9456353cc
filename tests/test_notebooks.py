"""The notebooks: what is checked in can be read on a page; every one runs from start to end, and shows what it says."""

import ast
import base64
import json
import re
from importlib import import_module
from pathlib import Path
from runpy import run_path
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
        "'[[ctx:' in several and spent <= 100",
    ],
    "llama_index_rag": [
        COSTS,
        SCORES,
        "[n.node.get_content() for n in response.source_nodes]"
        " == [n.node.get_content() for n in index.as_retriever(similarity_top_k=1).retrieve(questions[3])]",
    ],
    "chroma_store": [
        "torch.allclose(same.slots, soft.slots, atol=2 * step)",
        "sizes['int8, 16x'] < sizes['int8, 4x'] < sizes['fp16, 4x']",
    ],
    "what_does_a_ratio_cost": [
        "ratios == [4, 8, 16]",
        "column('f1', 4).mean() > column('f1', None, 'no context').mean()",
        "column('prompt_tokens', 4).mean() > column('prompt_tokens', 16).mean()",
    ],
    "train_for_your_decoder": ["report['resumed']", "history[-1]['step'] == 100", "stopped < 100"],
    "in_context_gradient_descent": [
        "abs(by_descent - by_attention) < 1e-9",
        "all(r.last.sensitivity_cosine > 0.98 for r in [*projection.values(), *dot_product.values()])",
        "all(abs(r.last.loss / r.last.reference_loss - 1) < 0.04"
        " for r in [*projection.values(), *dot_product.values()])",
        "all(abs(other / row[1] - 1) < 0.1 for rows in by_range.values() for row in rows for other in row)",
        "MEASURES['loss difference'][0](stacked[2, 25].last) > 2 * MEASURES['loss difference'][0](stacked[5, 25].last)",
        "all(projection_stacked[5, k].last.prediction_difference"
        " < 0.85 * projection_stacked[2, k].last.prediction_difference for k in (2, 10))",
        "0.9 * freedom['lemma'].last.loss > 0.9 * freedom['writes y'].last.loss > freedom['all'].last.loss",
        "all(sum(run.features.loss - run.features.reference_loss for run in runs) < 0 for runs in alignments.values())",
        "sum(run.features.sensitivity_cosine for run in with_teachers['Friedman', 'rank']) / len(SEEDS) > 0.8",
    ],
}
"""What a notebook says, whatever the bundle's weights, as expressions of its own names."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_notebook_says_holds(execute: Any, name: str) -> None:
    held = run(execute, FOLDER / f"{name}.ipynb", f"[bool(claim) for claim in ({', '.join(CLAIMS[name])},)]")
    assert all(held), list(zip(held, CLAIMS[name], strict=True))
