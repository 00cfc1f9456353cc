"""Means over sets and cases, counted by hand; and the command that writes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.scoring.tables import case_table
from benchmarks.world.world import world_examples
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.evaluation.answering import FULL, NONE, SOFT, Answers, SystemAnswers
from ctx_compress_rag.evaluation.questions import Question


def made(none: str, full: str, soft: str) -> tuple[list[Question], SystemAnswers]:
    """Questions, and which of them each system answers, as strings of y and n."""
    given = {(NONE, None): none, (FULL, None): full, (SOFT, 4): soft}
    questions = [Question(("p",), f"q{i}", ("yes",)) for i in range(len(none))]
    said = {k: Answers(["oh yes" if c == "y" else "no" for c in v], [9] * len(v), None) for k, v in given.items()}
    return questions, said


def test_cases_say_what_the_context_did(tiny_bundle: Any, tmp_path: Path) -> None:
    text, _ = case_table(tiny_bundle, *made("yynn", "ynyn", "yyyn"), tmp_path)
    head, *_, soft = text.splitlines()
    assert head == (
        "| context | ratio | right always (1) | right only without context (1) | right only from full text (1) "
        "| right never (1) |"
    )
    assert soft == "| soft context | 4x | 1.000 | 1.000 | 1.000 | 0.000 |"


def test_the_command_writes_every_table(
    bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "no_judge.py").write_text("class Judge:\n    def invoke(self, prompt):\n        return 'No.'\n")
    for name in ("one", "two"):
        write_jsonl(tmp_path / f"{name}.jsonl", world_examples("test", 3, 3, max_turns=1, passages=(1,)))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    folder = shutil.copytree(bundle_folder, tmp_path / "bundle")
    command = ["eval", "--bundle", str(folder), "--ratios", "4", "--output", str(tmp_path / "out"), "--data"]
    tables = ["--cost", "--perplexity", "--cases", "--judge", "no_judge:Judge", "--card"]
    assert main([*command, *files, *tables, "--in-domain", "one"]) == 0
    shown = capsys.readouterr().out
    for column in ("ms to first token", "reconstruction perplexity", "right always"):
        assert shown.count(column) == 2
    assert "F1 out of it" in shown
    assert shown.startswith((tmp_path / "out" / "scores.md").read_text().strip())
    kept = json.loads((tmp_path / "out" / "one" / "scores.json").read_text())
    assert {"costs", "reconstruction_perplexity", "cases", "judged"} <= kept.keys()
    [soft] = [score for score in kept["scores"] if score["system"] == SOFT]
    card = (folder / "README.md").read_text()
    assert "one, 3 questions" in card and f"{soft['f1']:.3f} ± {soft['f1_error']:.3f}" in card
    assert main([*command, *files, "--in-domain", "three"]) == 2
    assert "three" in capsys.readouterr().err
