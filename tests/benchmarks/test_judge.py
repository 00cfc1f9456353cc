"""Judges of answers: a rule through the harness, a chat model of LangChain, and one named on the command line."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage

from benchmarks.__main__ import main
from benchmarks.scoring.judge import judge_answers, load_judge, verdict
from benchmarks.world.world import world_examples
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.errors import ConfigError, JudgeError
from ctx_compress_rag.evaluation.answering import FULL, SOFT, answer
from ctx_compress_rag.evaluation.harness import evaluate, table
from ctx_compress_rag.evaluation.questions import Question, questions_of
from ctx_compress_rag.text.answers import contains_answer

ASKED = [("Who?", ["Orla", "Orla Reedwen"], "orla"), ("Where?", ["Pell"], "Kess\u2028mar"), ("When?", ["1903"], "soon")]


class Rule:
    """Right is what holds an accepted answer; of one question it cannot decide."""

    def __init__(self, undecided: str = "") -> None:
        self.undecided = undecided
        self.prompts: list[str] = []

    def invoke(self, prompt: str) -> str:
        self.prompts.append(prompt)
        fields = re.search(r"Question: (.*)\nGolden answers: (.*)\nAI-generated answer: ((?s:.*))", prompt)
        assert fields is not None
        if fields[1] == self.undecided:
            return "Hard to say."
        return "Yes." if contains_answer(fields[3], fields[2].split(" / ")) else "No, it is not."


@pytest.fixture(scope="module")
def questions(talkative: Any) -> list[Question]:
    """Of six, three accept what is answered from full text, two something else; one has no answer."""
    asked = questions_of(world_examples("test", 0, 6, max_turns=1, passages=(2,)))
    texts = answer(talkative, asked, [4], (FULL,), max_new_tokens=4, progress=False)[FULL, None].texts
    assert all(texts)
    accepted = [("nothing like it", text) if i < 3 else ("nothing like it",) for i, text in enumerate(texts[:5])]
    return [replace(q, answers=a) for q, a in zip(asked, [*accepted, ()], strict=True)]


def test_the_share_judged_right_is_that_of_the_verdicts(talkative: Any, questions: list[Question]) -> None:
    """A judge that looks for the accepted answers finds what the metric finds that does so."""
    judge = Rule()
    scores = evaluate(talkative, questions, (4, 8), judge=judge, max_new_tokens=4, progress=False)
    assert scores[0].judged == pytest.approx(3 / 5)
    assert scores[0].judged_error == pytest.approx(np.std([1, 1, 1, 0, 0], ddof=1) / 5**0.5)
    assert [score.judged for score in scores] == pytest.approx([score.contains for score in scores])
    assert [score.unread for score in scores] == [0] * len(scores)
    assert "| 0.600 ± 0.245 | 0 |" in table(scores)
    assert len(judge.prompts) == len(set(judge.prompts))  # the same answer is judged once
    assert not any(questions[5].question in prompt for prompt in judge.prompts)
    plain = evaluate(talkative, questions, (4,), max_new_tokens=4, progress=False)
    assert all(score.judged is score.unread is None for score in plain) and "judged" not in table(plain)


def test_verdicts_that_cannot_be_read_are_counted(talkative: Any, questions: list[Question]) -> None:
    judge = Rule(undecided=questions[0].question)
    full, *_ = evaluate(talkative, questions, (4,), judge=judge, max_new_tokens=4, progress=False)
    assert (full.judged, full.unread) == (pytest.approx(2 / 4), 1)
    mute = FakeListChatModel(responses=["I cannot say."])
    full, *_ = evaluate(talkative, questions, (4,), judge=mute, max_new_tokens=4, progress=False)
    assert (full.judged, full.judged_error, full.unread) == (None, None, 5)
    assert "|  | 5 |" in table([full])


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("Yes", True),
        ("**No**.", False),
        (" yes, the golden answers name it.", True),
        ("No\nThe golden answer is Pell.", False),
        ("Yes and no.", None),
        ("No doubt it is right.", None),
        ("No. Or rather yes.", None),
        ("The answer is correct: Yes", None),
        ("Not at all", None),
        ("Yesterday", None),
        ("", None),
    ],
)
def test_what_a_reply_says(reply: str, found: bool | None) -> None:
    assert verdict(reply) is found


def test_chat_models_of_langchain_are_judges() -> None:
    assert judge_answers(FakeListChatModel(responses=["Yes", "No.", "Perhaps"]), ASKED, False) == [True, False, None]
    blocks = [{"type": "reasoning", "reasoning": "No name is wrong."}, {"type": "text", "text": "Yes."}]
    replies = iter([AIMessage(blocks), AIMessage("No."), AIMessage("")])
    assert judge_answers(GenericFakeChatModel(messages=replies), ASKED, False) == [True, False, None]


def test_an_interrupted_judging_continues_and_a_finished_one_is_asked_again(tmp_path: Path) -> None:
    log = tmp_path / "judged.jsonl"

    class Limited(Rule):
        """As an endpoint that refuses after so many requests."""

        def __init__(self, left: int) -> None:
            super().__init__()
            self.left = left

        def invoke(self, prompt: str) -> str:
            self.left -= 1
            if self.left < 0:
                raise ConnectionError("quota")
            return super().invoke(prompt)

    with pytest.raises(JudgeError, match="quota"):
        judge_answers(Limited(2), ASKED, False, log)
    assert not log.exists()
    part = tmp_path / "judged.jsonl.part"
    part.write_text(part.read_text() + '{"prompt": "cut o')
    second = Limited(1)
    assert judge_answers(second, ASKED, False, log) == [True, False, False]
    assert [prompt for prompt in second.prompts if "When?" not in prompt] == []
    assert [json.loads(line)["reply"] for line in log.read_text().split("\n")[:-1]] == ["Yes."] + ["No, it is not."] * 2
    assert not part.exists()
    again = Limited(3)
    assert judge_answers(again, ASKED, False, log) == [True, False, False] and len(again.prompts) == 3


def test_a_reply_that_is_no_text_is_refused() -> None:
    class Wrong:
        def invoke(self, prompt: str) -> Any:
            return {"verdict": prompt}

    with pytest.raises(ConfigError, match="the judge replied with a dict: its invoke must return a string"):
        judge_answers(Wrong(), ASKED, False)


@pytest.fixture
def command(bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What scores a bundle on a file in the working folder, where modules of judges may be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in ("one", "two"):
        write_jsonl(tmp_path / f"{name}.jsonl", world_examples("test", 3, 3, max_turns=1, passages=(1,)))
    options = ["--bundle", str(bundle_folder), "--ratios", "4", "--no-extraction", "--output", "out"]
    return ["eval", *options, "--data", "one.jsonl"]


def test_a_judge_that_fails_is_named(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """In a line, not a traceback; the answers that were given are not asked for again."""
    Path("absent_judge.py").write_text(
        "class Absent:\n    def invoke(self, prompt):\n        raise TimeoutError('nobody at port 8000')\n"
        "def make():\n    return Absent()\n"
    )
    assert main([*command, "--judge", "absent_judge:make"]) == 2
    said = capsys.readouterr().err
    assert "the judge failed (TimeoutError: nobody at port 8000): make sure that it answers" in said
    assert len(Path("out/answers.jsonl").read_text().splitlines()) > 3


def test_the_command_asks_the_judge_it_is_given(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("strict_judge.py").write_text(
        "from langchain_core.language_models.fake_chat_models import FakeListChatModel\n"
        "def make():\n    return FakeListChatModel(responses=['No.'])\n"
    )
    assert main([*command, "two.jsonl", "--judge", "strict_judge:make", "--cost"]) == 0
    saved = json.loads(Path("out/one/scores.json").read_text())
    assert saved["judge"] == "FakeListChatModel"
    assert (saved["template"], saved["max_new_tokens"]) == ("{context}\n\nQuestion: {question}", 32)
    assert (saved["codec"], saved["decoder"]) == ("int8", "torch.float32 on cpu")
    assert "No." in Path("out/one/judged.jsonl").read_text()
    assert [(row["judged"], row["unread"]) for row in saved["scores"]] == [(0.0, 0)] * 4
    costs = {row["system"]: row["cost"]["first_token_flops"] for row in saved["scores"]}
    assert 0 < costs[SOFT] < costs[FULL]
    shown = capsys.readouterr().out
    assert shown.count("| ms to first token |") == 2 and "| contains | judged right |" in shown  # the means, too
    assert "| ms to first token |" in Path("out/one/scores.md").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("json:make", "has no attribute 'make'"),
        ("json", "'module' object is not callable"),
        ("json:loads", "missing 1 required positional argument"),
        ("no name", "invalid format"),
        ("collections:Counter", "makes a Counter, which has no invoke: return a chat model"),
    ],
)
def test_judges_that_cannot_be_made_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"judge {name!r}")) as refused:
        load_judge(name)
    assert message in str(refused.value)
