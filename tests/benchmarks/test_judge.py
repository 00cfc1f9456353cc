"""Judges of answers: a rule over a set's answers, a chat model of LangChain, one named on the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage

from benchmarks.scoring.judge import JudgeError, JudgeTable, judge_answers, load_judge, verdict
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation.answering import FULL, NONE, Answers
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.text.answers import contains_answer

ASKED = [("Who?", ["Orla", "Orla Reedwen"], "orla"), ("Where?", ["Pell"], "Kess\u2028mar"), ("When?", ["1903"], "soon")]


class Rule:
    """Right is what holds an accepted answer; of one question it cannot decide; after `left` replies it fails."""

    def __init__(self, undecided: str = "", left: int = 100) -> None:
        self.undecided, self.left = undecided, left
        self.prompts: list[str] = []

    def invoke(self, prompt: str) -> str:
        if len(self.prompts) == self.left:
            raise ConnectionError("quota")
        self.prompts.append(prompt)
        fields = re.search(r"Question: (.*)\nGolden answers: (.*)\nAI-generated answer: ((?s:.*))", prompt)
        assert fields is not None
        if fields[1] == self.undecided:
            return "Hard to say."
        return "Yes." if contains_answer(fields[3], fields[2].split(" / ")) else "No, it is not."


def test_the_share_judged_right_is_that_of_the_verdicts(tiny_bundle: Any, tmp_path: Path) -> None:
    """Each answer is judged once; questions without an answer are not."""
    questions = [Question(("p",), name, (name,) if name != "none" else ()) for name in ("a", "b", "c", "d", "none")]
    answers = {
        (FULL, None): Answers(["a", "b", "x", "d", "none"], 1.0, None),
        (NONE, None): Answers(["x", "x", "x", "x", "x"], 1.0, None),
    }
    judge = Rule(undecided="d")
    text, numbers = JudgeTable(judge)(tiny_bundle, questions, answers, tmp_path)
    assert [row["right"] for row in numbers] == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert "| full text |  | 0.667 ± 0.333 | 1 |" in text
    assert len(judge.prompts) == len(set(judge.prompts)) == 7
    assert len((tmp_path / "judged.jsonl").read_text().splitlines()) == 7


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("Yes", True),
        ("**No**.", False),
        (" yes, the golden answers name it.", True),
        ("Yes and no.", None),
        ("No doubt it is right.", None),
        ("No. Or rather yes.", None),
        ("The answer is correct: Yes", None),
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


def test_an_interrupted_judging_continues(tmp_path: Path) -> None:
    log, part = tmp_path / "judged.jsonl", tmp_path / "judged.jsonl.part"
    with pytest.raises(JudgeError, match="quota"):
        judge_answers(Rule(left=2), ASKED, False, log)
    assert not log.exists()
    part.write_text(part.read_text() + '{"prompt": "cut o')
    second = Rule(left=1)
    assert judge_answers(second, ASKED, False, log) == [True, False, False]
    assert ["When?" in prompt for prompt in second.prompts] == [True]
    assert [json.loads(line)["reply"] for line in log.read_text().split("\n")[:-1]] == ["Yes."] + ["No, it is not."] * 2
    assert not part.exists()


def test_judges_are_named_as_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    Path("strict_judge.py").write_text("class Judge:\n    def invoke(self, prompt):\n        return 'No.'\n")
    assert judge_answers(load_judge("strict_judge:Judge"), ASKED, False) == [False] * 3
    for name in ("no_such_module:make", "json:make", "json", "json:loads", "collections:Counter"):
        with pytest.raises(ConfigError, match=re.escape(f"judge {name!r}")):
            load_judge(name)
