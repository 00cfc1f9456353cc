"""The command line: what it prints, and its exit codes."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import chromadb
import numpy as np
import pytest
import yaml
from typer.main import get_command

from benchmarks.world.world import world_examples
from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.cli import main
from ctx_compress_rag.cli.shared import app
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.store.key import KEY_VARIABLE
from ctx_compress_rag.training.run import SHIPPED
from helpers.cli import contents, write_docs
from helpers.store import WordBundle


class Run:
    """Runs a command in this process and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object) -> int:
        self._capsys.readouterr()
        code = main([*map(str, args)])
        self.out, self.err = self._capsys.readouterr()
        return code

    def fails(self, *args: object) -> str:
        """The one line of a command that must end with code 2 and say nothing else."""
        assert self(*args) == 2
        assert self.out == ""
        [line] = self.err.splitlines()
        return line.removeprefix("ctx-compress: error: ")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture(scope="session")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_docs(tmp_path_factory.mktemp("corpus") / "docs", files=3)


QUESTION = "Who is the mayor of the town?"


@pytest.fixture(autouse=True, scope="module")
def one_key() -> Any:
    """Markers, and with them records, are the same in all stores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, "k" * 32)
        yield


@pytest.fixture(scope="module")
def store(bundle_folder: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of `docs`."""
    folder = tmp_path_factory.mktemp("index") / "chroma"
    assert main(["index", str(docs), "--index", str(folder), "--bundle", str(bundle_folder)]) == 0
    return folder


def test_deleted_files_need_prune(run: Any, bundle_folder: Path, tmp_path: Path) -> None:
    folder, target = write_docs(tmp_path / "docs", files=2), tmp_path / "chroma"
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    assert run("index", folder, "--index", target, "--bundle", bundle_folder, "--codec", "fp16") == 0
    assert "skipped: 1 .txt\n" in run.out
    (folder / "file0.txt").unlink()
    gone = sum("file0.txt" in id for id in contents(target))
    assert run("index", folder, "--index", target) == 0  # the store knows its bundle
    assert "0 passages compressed" in run.out and ", with tiny, which reads" in run.out
    assert "compressing" not in run.err
    assert f"kept passages of deleted files: {gone} (--prune removes them)" in run.out
    assert run("index", folder, "--index", target, "--prune") == 0
    assert f"removed passages: 0 of changed files, {gone} of deleted ones" in run.out
    assert {metadata["source"] for _, metadata, *_ in contents(target).values()} == {"more/file1.txt"}
    assert run("info", "--index", target) == 0
    assert "fp16" in run.out


def passages_shown(sources: str) -> list[tuple[str, str]]:
    """Texts and files of the passages that `ask` shows, in order."""
    parts = re.split(r"^\[\d+\] (.+) \(-?\d\.\d\d\), .*\n", sources, flags=re.MULTILINE)[1:]
    return [(dedent(text).strip(), file) for file, text in zip(parts[::2], parts[1::2], strict=True)]


def test_a_terminal_obeys_nothing_that_a_file_holds(
    run: Any, bundle_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escape codes, marks that turn the writing and bytes that are no text, in names and in passages."""
    docs, target = tmp_path / "docs", tmp_path / "chroma"
    docs.mkdir()
    (docs / "red\x1b[31m\u202e.txt").write_bytes(b"Anna\x1b]0;mine\x07 is the mayor.\r\nShe is\ttall.")
    (docs / "empty\x1b[31m.txt").touch()
    assert run("index", docs, "--index", target, "--bundle", bundle_folder) == 0
    assert "empty\\x1b[31m.txt': it is empty" in caplog.text and "\x1b" not in caplog.text
    assert run("ask", QUESTION, "--index", target) == 0
    assert not set(run.out) & set("\x1b\x07\r\u202e")
    assert "[1] red\ufffd[31m\ufffd.txt (" in run.out
    assert "Anna\ufffd]0;mine\ufffd is the mayor.\n    She is\ttall." in run.out
    monkeypatch.setenv(KEY_VARIABLE, "other" * 8)
    assert run("ask", QUESTION, "--index", target) == 0
    assert "red\\x1b[31m" in caplog.text and "\x1b" not in caplog.text


def test_a_file_name_that_is_no_text_is_shown_with_its_bytes(
    run: Any, bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's too, and a question with such bytes is asked. What a console cannot show is a question mark."""
    docs = tmp_path / os.fsdecode(b"doc\xe9")
    docs.mkdir()
    (docs / os.fsdecode(b"caf\xe9.txt")).write_text("Anna is the mayor of Köln and 東京.", encoding="utf-8")
    index = ["index", docs, "--index", tmp_path / "chroma", "--prune"]
    assert run(*index, "--bundle", bundle_folder) == 0
    assert f"1 files in {tmp_path}/doc\ufffd: 1 passages" in run.out
    assert run("ask", os.fsdecode(b"caf\xe9?"), "--index", tmp_path / "chroma") == 0
    assert "[1] caf\\xe9.txt (" in run.out
    assert run(*index) == 0
    assert "0 passages compressed, 1 unchanged" in run.out
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr("sys.stdout", console)
    assert main(["ask", QUESTION, "--index", str(tmp_path / "chroma")]) == 0
    console.seek(0)
    assert console.read().splitlines()[-1] == "    Anna is the mayor of Köln and ??."


def test_ask_reads_slots_at_the_ratio(run: Any, store: Path, bundle_folder: Path) -> None:
    tokenizer = Bundle.from_pretrained(bundle_folder, device="cpu").tokenizer

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    for ratio, option, limit in ((4, [], 2), (16, ["--ratio", 16, "--max-tokens", 5], 5)):  # 2 is the bundle's
        assert run("ask", QUESTION, "--index", store, *option) == 0
        report, _, sources = run.out.partition(" of them slots. Read:\n")
        assert limit <= count(report.partition("\n\n")[0]) <= limit + 1  # the space at its beginning is left out
        lengths = [count(text) for text, _ in passages_shown(sources)]
        assert len(lengths) == 4
        assert report.endswith(f", {sum(-(-length // ratio) for length in lengths)}")
    assert run("ask", QUESTION, "--index", store, "--k", 3, "--token-budget", 12) == 0
    slots = re.search(r", (\d+) of them slots", run.out)
    assert slots and 3 <= int(slots[1]) <= 10  # two separators beside them
    assert run("ask", QUESTION, "--index", store, "--text", "--k", 2) == 0
    assert "\nFree answer" in run.out and run.out.count("), text\n") == 2 and " 0 of them slots" in run.out
    assert run("ask", QUESTION, "--index", store, "--token-budget", 40, "--text-share", 0.5, "--free") == 0
    assert re.search(r"\), text", run.out) and re.search(r"\), .*\d slots\n", run.out)


def test_ask_quotes_what_the_slots_stand_for(run: Any, store: Path) -> None:
    assert run("ask", QUESTION, "--index", store, "--extractive", "--max-tokens", 8) == 0
    answer, _, sources = run.out.partition("\n\n")
    assert answer.strip() and "0 of them slots" not in sources
    shown = [text for text, _ in passages_shown(sources.partition("Read:\n")[2])]
    having = [f"[{number}]" for number, text in enumerate(shown, 1) if answer.strip() in text]
    assert having and f"Quoted, found in {', '.join(having)}. " in sources


def test_ask_reads_questions_until_the_end(run: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for question in (QUESTION, "Who built the mill?"):
        assert run("ask", question, "--index", store) == 0
        said.append(f"\nQuestion: {question}\n{run.out}")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n \nWho built the mill?"))
    assert run("ask", "--index", store) == 0
    assert run.out == "".join(said)
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert "give one" in run.fails("ask", "--index", store)


def test_info(run: Any, store: Path, bundle_folder: Path) -> None:
    rows = contents(store).values()
    assert run("info", "--index", store) == 0
    lines = {line[:14].strip(): line[15:] for line in run.out.splitlines()}
    assert lines["bundle"] == f"tiny ({bundle_folder.resolve()})"
    assert lines["embedder"] == "minilm"
    assert lines["fingerprint"] == Bundle.from_pretrained(bundle_folder, device="cpu").fingerprint
    assert lines["passages"] == f"{len(rows)} from 3 files"
    assert lines["source tokens"] == f"{sum(soft.n_tokens for *_, soft, _ in rows):,}"
    assert lines["slots"] == f"{sum(soft.n_slots for *_, soft, _ in rows):,} at ratio 4"
    disk = int(lines["bytes on disk"].split()[0].rstrip(",").replace(",", ""))
    share = int(lines["payload bytes"].replace(",", "")) / disk
    assert disk == sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    assert lines["payload share"] == f"{share:.0%}"


def test_errors_are_one_line_and_code_2(run: Any, store: Path, docs: Path, bundle_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    new, other = tmp_path / "new", tmp_path / "app"
    with SoftContextStore(other, WordBundle(), collection="docs") as apps:
        apps.add(["a passage"], progress=False)
    index = ["index", docs, "--bundle", bundle_folder, "--index"]
    for command, message in (
        (["index", tmp_path / "none", "--index", new], "no .txt, .md"),
        (["index", tmp_path / "missing", "--index", new], "does not exist"),
        (["index", docs / "file0.txt", "--index", new], "is not a folder"),
        (["index", docs, "--index", new, "--bundle", "nowhere"], "no bundle 'nowhere'"),
        ([*index, store, "--codec", "fp16"], "codec 'int8'"),
        (["ask", " ", "--index", store], "question is empty"),
        (["ask", QUESTION, "--index", store, "--ratio", 6], "multiple of 4"),
        (["ask", QUESTION, "--index", tmp_path / "elsewhere"], "ctx-compress index DIR --index"),
        (["info", "--index", tmp_path / "elsewhere"], "no store at"),
        (["backup", "--index", tmp_path / "elsewhere", new], "no store at"),
        (["info", "--index", other], "holds no index"),
        (["train", "demo/nothing"], "no recipe 'demo/nothing'"),
        (["agree", docs / "file0.txt", "--index", new, "--output", docs / "file2.txt"], "file2.txt"),
    ):
        assert message in run.fails(*command), command
    assert not (tmp_path / "elsewhere").exists()


def test_a_pipe_that_nobody_reads_on_is_no_error(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["info", "--index", str(store)]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("command", "unwanted"), [(["ask", "--help"], "torch transformers chromadb"), (["info"], "transformers")]
)
def test_a_command_imports_only_what_it_needs(store: Path, command: list[str], unwanted: str) -> None:
    code = (
        "import sys; from ctx_compress_rag.cli import main\n"
        "assert main(sys.argv[2:]) == 0\n"
        "assert not set(sys.argv[1].split()) & sys.modules.keys()"
    )
    given = [sys.executable, "-c", code, unwanted, *command, "--index", str(store)]
    done = subprocess.run(given, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_info_prunes_soft_contexts_without_a_passage_in_a_backup(run: Any, store: Path, tmp_path: Path) -> None:
    assert run("backup", "--index", store, tmp_path / "copy") == 0
    copied, whole = (
        {id: (text, metadata, vector.tolist(), record) for id, (text, metadata, vector, _, record) in held.items()}
        for held in map(contents, (tmp_path / "copy", store))
    )
    assert copied == whole
    assert "does not exist yet" in run.fails("backup", "--index", store, tmp_path / "copy")
    client = chromadb.PersistentClient(str(tmp_path / "copy"))
    passages = client.get_collection("passages", embedding_function=None)
    [gone, *kept] = passages.get()["ids"]
    passages.delete([gone])
    client.close()
    assert run("info", "--index", tmp_path / "copy") == 0
    assert "orphans        1 soft contexts without a passage" in run.out
    assert run("info", "--index", tmp_path / "copy", "--prune") == 0
    assert "deleted soft contexts without a passage: 1\n" in run.out and "orphans" not in run.out
    assert contents(tmp_path / "copy").keys() == set(kept)


TEXT = "Orla kept bees in Pellmouth, by the old mill on the river, until the flood of the year 1911."


@pytest.fixture
def command(tmp_path: Path, bundle_folder: Path) -> list[object]:
    """Compresses an app's collection of one text."""
    client = chromadb.PersistentClient(str(tmp_path / "chroma"))
    made = client.create_collection("docs", embedding_function=None)
    made.add(ids=["orla"], embeddings=[[1.0, 0.0]], documents=[TEXT])
    client.close()
    return ["index", "--collection", "docs", "--index", tmp_path / "chroma", "--bundle", bundle_folder]


def test_passages_are_compressed_in_the_dtype_and_on_the_device(
    run: Any, command: list[object], bundle_folder: Path, tmp_path: Path
) -> None:
    assert run(*command, "--dtype", "bfloat16", "--device", "cpu", "--codec", "fp16") == 0
    assert f"1 passages compressed, 0 unchanged, with {bundle_folder}\n" in run.out
    collection = chromadb.PersistentClient(str(tmp_path / "chroma")).get_collection("docs", embedding_function=None)
    with SoftContextStore(collection, Bundle.from_pretrained(bundle_folder)) as store:
        [stored] = store.get(["orla"])
    assert stored is not None
    for other in ("float32", "bfloat16"):
        [made] = Bundle.from_pretrained(bundle_folder, dtype=other).compress([TEXT])
        assert np.array_equal(stored.slots, made.slots.astype(np.float16)) is (other == "bfloat16")


def test_names_that_are_not_utf_8_are_told(run: Any, command: list[object], docs: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    at = command.index("docs")
    said = run.fails(*command[:at], name, *command[at + 1 :])
    assert "no collection 'caf\\udce9' in" in said and said.endswith("there are docs")
    (tmp_path / "chroma").rename(tmp_path / name)
    at = command.index("--index") + 1
    for there in ([*command[:at], tmp_path / name], ["index", docs, "--index", tmp_path / f"new {name}"]):
        assert "caf\\udce9', whose name is not UTF-8: rename it" in run.fails(*there)
    assert not (tmp_path / f"new {name}").exists()


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
        given = COMMANDS["agree"].make_context("agree", ["a.txt", "--index", "s", *args]).params
        assert (given["ratios"], given["k"], given["questions"]) == ([4, 8], 3, "a.txt")


@pytest.mark.parametrize(("package", "extra"), [("matplotlib", "train"), ("sentencex", "sentences")])
def test_a_package_that_is_missing_is_named_before_the_work(
    run: Any, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    said = run.fails("eval", "--data", "nowhere.jsonl")
    assert package in said and "is not installed" in said and f"ctx-compress-rag[{extra}]" in said


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
    assert run(*args) == 2 and named in run.err
    assert not list(tmp_path.iterdir())


def test_eval_refuses_before_it_answers(
    run: Any, bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tmp_path / "one.jsonl"
    write_jsonl(one, world_examples("test", 0, 1, max_turns=1, passages=(1,)))
    two = tmp_path / "two.jsonl"
    write_jsonl(two, world_examples("test", 0, 2, max_turns=1, passages=(1,)))
    evaluate = ["eval", "--bundle", bundle_folder, "--no-extraction", "--output", tmp_path / "out", "--data", two]
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "generate", lambda *_, **__: pytest.fail("a question was answered"))
        for given, message in (
            (["--data", one], "one: 1 questions have an answer"),
            (["--ratios", 4, 5], "ratio 5 cannot be made from slots stored at 4"),
            (["--data", tmp_path / "missing.jsonl"], "missing.jsonl"),
            (["--data", tmp_path], "in UTF-8"),
        ):
            assert message in run.fails(*evaluate, *given), given
    assert not (tmp_path / "out").exists()
    assert run(*evaluate, "--ratios", 8, "--codec", "fp16", "--max-tokens", 3, "--extractive", "--batch-size", 1) == 0
    saved = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert {row["ratio"] for row in saved["scores"]} == {None, 8} and run.out.endswith(f"also in {tmp_path}/out\n")
    assert (saved["codec"], saved["max_tokens"], saved["extractive"]) == ("fp16", 3, True)


@pytest.mark.parametrize("content", ["stage: größer".encode("latin-1"), b"stage: 2026-99-99", b"stage: ["])
def test_a_file_that_is_no_yaml_is_named(run: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    assert "mine.yaml is not valid YAML" in run.fails("train", tmp_path / "mine.yaml")


@pytest.mark.parametrize("text", ["", "[1, 2]", "name: mine\n"])
def test_a_recipe_without_a_stage_is_told_which_there_are(run: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    said = run.fails("train", tmp_path / "mine.yaml")
    assert "mine.yaml has no stage" in said
    stages = {yaml.safe_load(file.read_text())["stage"] for file in SHIPPED.rglob("*.yaml")}
    assert all(stage in said for stage in stages)
