"""Judges of answers: a rule over a set's answers."""

import re
from pathlib import Path
from typing import Any

from benchmarks.scoring.judge import JudgeTable, verdict
from ctx_compress_rag.evaluation.answering import FULL, NONE, Answers
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.text.answers import contains_answer


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
