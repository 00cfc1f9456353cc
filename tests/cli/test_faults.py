"""What a user can mend ends a command with one line and code 2, before any work where it can be seen before."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from benchmarks.world.world import world_examples
from ctx_compress_rag.cli import main
from ctx_compress_rag.cli.command import app
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.training.recipe import SHIPPED
from helpers.forked import run_python

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_that_is_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    _, example = " ".join(capsys.readouterr().out.split()).split("Example: ctx-compress ")
    given, *args = shlex.split(example)
    assert given == name
    assert COMMANDS[name].make_context(name, args).params


def test_a_list_is_several_values_after_one_flag_or_several_flags() -> None:
    for args in (["--ratios", "4", "8", "--k", "3"], ["--k", "3", "--ratios", "4", "--ratios", "8"]):
        given = COMMANDS["agree"].make_context("agree", ["a.txt", "--store", "s", *args]).params
        assert (given["ratios"], given["k"], given["questions"]) == ([4, 8], 3, "a.txt")


@pytest.mark.parametrize(
    ("package", "extra", "args"),
    [
        ("matplotlib", "train", ["eval", "--data", "nowhere.jsonl"]),
        ("sentencex", "sentences", ["eval", "--data", "nowhere.jsonl"]),
    ],
)
def test_a_package_that_is_missing_is_named_before_the_work(
    package: str, extra: str, args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(args) != 0
    said = capsys.readouterr().err
    assert package in said and "is not installed" in said and f"ctx-compress-rag[{extra}]" in said


FULL = """
import resource, sys
from ctx_compress_rag.cli import main
from ctx_compress_rag.indexing import index

real = index.embed_passages

def then_full(*args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # no file grows further: a disk error
    return real(*args)

index.embed_passages = then_full
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_is_one_line_and_is_resumed(run: Any, bundle_folder: Path, docs: Path, tmp_path: Path) -> None:
    command = ["index", docs, "--bundle", bundle_folder, "--store", tmp_path / "chroma"]
    done = run_python(FULL, *command)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ctx-compress: error: ") and str(tmp_path / "chroma") in last and "File too large" in last
    assert run(*command) == 0
    assert " 0 unchanged" in run.out


def test_agree_finds_out_before_the_answers_that_its_output_is_no_folder(run: Any, tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("Who?\n")
    (tmp_path / "file").write_text("kept")
    # There is no store either, which is found out only later.
    assert str(tmp_path / "file") in run.fails(
        "agree", tmp_path / "q.txt", "--store", tmp_path / "s", "--output", tmp_path / "file"
    )


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["ask", "x", "--ratio", 8, "--token-budget", 12], "--ratio and --token-budget"),
        (["ask", "x", "--ratio", 8, "--text"], "--ratio and --text"),
        (["index", "--collection", "docs", "--embedder", "minilm"], "--collection and --embedder"),
        (["index", "--collection", "docs", "--prune"], "--collection and --prune"),
        (["index", "--collection", "docs", "--chunk-tokens", 64], "--collection and --chunk-tokens"),
        (["index", "docs", "--collection", "docs"], "--collection NAME"),
        (["index"], "--collection NAME"),
        (["index", "docs", "--codec", "int3"], "int3"),
        (["eval", "--data", "nowhere.jsonl", "--codec", "int3"], "int3"),
        (["ask", "x", "--weights", "Q8_0"], "weights"),
        (["eval", "--data", "nowhere.jsonl", "--weights", "Q8_0"], "weights"),
        (["serve", "--weights", "Q8_0"], "weights"),
        (["agree", "rows.jsonl"], "give a text file with one question per line"),
    ],
)
def test_options_that_cannot_be_given_together_are_refused_before_a_store_is_opened(
    run: Any, args: list[object], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no store, nor what else they name
    assert named in run.fails(*args)
    assert not list(tmp_path.iterdir())


def test_eval_refuses_before_it_answers(
    run: Any, bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "generate", lambda *_, **__: pytest.fail("a question was answered"))
    one = tmp_path / "one.jsonl"
    write_jsonl(one, world_examples("test", 0, 1, max_turns=1, passages=(1,)))
    two = tmp_path / "two.jsonl"
    write_jsonl(two, world_examples("test", 0, 2, max_turns=1, passages=(1,)))
    evaluate = ["eval", "--bundle", bundle_folder, "--no-extraction", "--output", tmp_path / "out", "--data", two]
    for given, message in (
        (["--data", one], "one: 1 questions have an answer"),
        (["--ratios", 4, 5], "ratio 5 cannot be made from slots stored at 4"),
        (["--data", tmp_path / "missing.jsonl"], "missing.jsonl"),
        (["--data", tmp_path], "in UTF-8"),
    ):
        assert message in run.fails(*evaluate, *given), given
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "[1, 2]", "name: mine\n"])
def test_a_recipe_without_a_stage_is_told_which_there_are(run: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    said = run.fails("train", tmp_path / "mine.yaml")
    assert "mine.yaml has no stage" in said
    stages = {yaml.safe_load(file.read_text())["stage"] for file in SHIPPED.rglob("*.yaml")}
    assert all(stage in said for stage in stages)
