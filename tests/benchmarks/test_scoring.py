"""Judges, cases, thresholds and prompts of several passages, counted by hand; the command that writes all tables."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.scoring.confidence import Sure, best_threshold
from benchmarks.scoring.judge import JudgeTable, verdict
from benchmarks.scoring.tables import case_table
from benchmarks.several.neighbors import NEAREST, among_neighbors
from benchmarks.world.world import world_examples
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.evaluation.answering import FULL, NONE, SOFT, Answers, SystemAnswers
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.models.sentence_embedding import embed_passages
from ctx_compress_rag.text.answers import contains_answer, mentions_answer


class Rule:
    """Right is what holds an accepted answer; of the question "d" it cannot decide."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def invoke(self, prompt: str) -> str:
        self.prompts.append(prompt)
        fields = re.search(r"Question: (.*)\nGolden answers: (.*)\nAI-generated answer: ((?s:.*))", prompt)
        assert fields is not None
        if fields[1] == "d":
            return "Hard to say."
        return "Yes." if contains_answer(fields[3], fields[2].split(" / ")) else "No, it is not."


def test_the_share_judged_right_is_that_of_the_verdicts(tiny_bundle: Any, tmp_path: Path) -> None:
    """Each answer is judged once; questions without an answer are not."""
    questions = [Question(("p",), name, (name,) if name != "none" else ()) for name in ("a", "b", "c", "d", "none")]
    answers = {
        (FULL, None): Answers(["a", "b", "x", "d", "none"], [1] * 5, None),
        (NONE, None): Answers(["x", "x", "x", "x", "x"], [1] * 5, None),
    }
    judge = Rule()
    text, numbers = JudgeTable(judge)(tiny_bundle, questions, answers, tmp_path)
    assert [row["right"] for row in numbers] == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert "| full text |  | 0.667 ± 0.333 | 1 |" in text
    assert len(judge.prompts) == len(set(judge.prompts)) == 7
    assert len((tmp_path / "judged.jsonl").read_text().splitlines()) == 7


def test_what_a_reply_says() -> None:
    replies = {"Yes": True, "**No**.": False, " yes, the golden answers name it.": True}
    unclear = ("Yes and no.", "No doubt it is right.", "No. Or rather yes.", "The answer is correct: Yes", "")
    for reply, found in (replies | dict.fromkeys(unclear)).items():
        assert verdict(reply) is found, reply


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


def test_distractors_are_near_without_the_answer_and_the_evidence_stays() -> None:
    examples = world_examples("test", 0, 60, 1, (1,))
    passages = list(dict.fromkeys(e.passages[0] for e in examples))
    cosines = embed_passages(passages) @ embed_passages(passages).T
    several = 0
    for before, after in zip(examples, among_neighbors(examples, [1, 3]), strict=True):
        own = before.passages[0]
        others = [passage for passage in after.passages if passage != own]
        assert len(others) == len(after.passages) - 1
        allowed = [not mentions_answer(passage, before.turns[0].answers) for passage in passages]
        near = [place for place in (-cosines[passages.index(own)]).argsort() if allowed[place]]
        assert {*others} <= {passages[place] for place in near[:NEAREST]}
        assert all(part in own and before.turns[0].answers[0] in part for part in after.turns[0].evidence)
        several += len(others) == 2
    assert 10 < several < 50


def test_no_threshold_scores_higher_than_the_best() -> None:
    draw = random.Random(0)
    for _ in range(50):
        answers = [Sure(draw.gauss(0, 1), draw.random(), draw.random() < 0.5) for _ in range(draw.randint(1, 12))]
        best = sum(a.score(best_threshold(answers)) for a in answers)
        for threshold in (-9.0, *(draw.gauss(0, 1) for _ in range(30)), 9.0):
            declining = [a.logprob < threshold for a in answers]
            scores = [float(not a.answerable) if d else a.f1 for d, a in zip(declining, answers, strict=True)]
            assert sum(scores) <= best + 1e-9
