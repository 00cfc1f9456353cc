"""Answers kept while they are given."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.world.world import world_examples
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.evaluation import answering
from ctx_compress_rag.evaluation.answer_log import AnswerLog
from ctx_compress_rag.evaluation.answering import (
    FULL,
    NONE,
    SOFT,
    TRUNCATED,
    SystemAnswers,
    answer_questions,
)
from ctx_compress_rag.evaluation.questions import Question, questions_of

QUESTIONS = questions_of(world_examples("test", 0, 5, max_turns=1, passages=(1,)))
RATIOS, AT_ONCE = (4, 8), 2
CALLS = 6 * 3  # full text, nothing, and two systems at two ratios; 5 questions, 2 at once


class Asked:
    """Counts calls of the decoder, and interrupts one of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.last = 0, CALLS + 1
        real = Decoder.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            if self.calls == self.last:
                raise KeyboardInterrupt
            self.calls += 1
            return real(*args, **kwargs)

        patch.setattr(Decoder, "generate", generate)
        patch.setattr(answering, "_AT_ONCE", AT_ONCE)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def scored(bundle: Any, questions: list[Question], log: Path | None, **options: Any) -> SystemAnswers:
    return answer_questions(bundle, questions, RATIOS, (FULL, NONE, SOFT, TRUNCATED), max_tokens=4, log=log, **options)


@pytest.fixture(scope="module")
def plain(tiny_bundle: Any) -> SystemAnswers:
    """Without a log, and in one go."""
    with pytest.MonkeyPatch.context() as patch:
        asked = Asked(patch)
        made = scored(tiny_bundle, QUESTIONS, None)
    assert asked.calls == CALLS
    return made


@pytest.mark.parametrize("stopped_at", [0, 1, 7, CALLS - 1])
def test_an_interrupted_run_continues_from_its_answers(
    tiny_bundle: Any, plain: SystemAnswers, asked: Asked, tmp_path: Path, stopped_at: int
) -> None:
    asked.last = stopped_at
    log = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        scored(tiny_bundle, QUESTIONS, log)
    with log.open("ab") as file:
        file.write(b'{"system": "full te')  # the line that a kill cut off
    asked.last = CALLS + 1
    assert scored(tiny_bundle, QUESTIONS, log) == plain
    assert asked.calls == CALLS


def test_answers_of_another_run_are_not_taken(tiny_bundle: Any, asked: Asked, tmp_path: Path) -> None:
    log = tmp_path / "answers.jsonl"
    scored(tiny_bundle, QUESTIONS, log)
    for others, options in ((QUESTIONS[:4], {}), (QUESTIONS, {"extractive": True}), (QUESTIONS, {})):
        asked.calls = 0
        scored(tiny_bundle, others, log, **options)
        assert asked.calls == 6 * -(-len(others) // AT_ONCE)


def test_any_text_is_read_back(tmp_path: Path) -> None:
    odd = ["two\nlines", "\u2028\x85\x0b\x1c", "", "{}", "🦀 \r"]
    asked = [Question((), "\u2029?", tuple(odd))] * len(odd)
    log = AnswerLog(tmp_path / "log", {"run": 1}, asked)
    log.add((FULL, None), asked, [(text, 7) for text in odd])
    assert AnswerLog(tmp_path / "log", {"run": 1}, asked).given((FULL, None)) == [(text, 7) for text in odd]
    assert AnswerLog(tmp_path / "log", {"run": 2}, asked).given((FULL, None)) == []


@pytest.mark.parametrize("change", ["a line is deleted", "lines are there twice", "a line is damaged"])
def test_answers_stay_with_their_questions(
    tiny_bundle: Any, plain: SystemAnswers, asked: Asked, tmp_path: Path, change: str
) -> None:
    """Also in a file that a person edited, or that two processes wrote."""
    log = tmp_path / "answers.jsonl"
    scored(tiny_bundle, QUESTIONS, log)
    lines = log.read_bytes().splitlines(keepends=True)
    changed = {
        "a line is deleted": lines[:2] + lines[3:],
        "lines are there twice": lines[:6] + lines[1:],
        "a line is damaged": [*lines[:2], b"{}\n", b"[]\n", *lines[2:]],
    }
    log.write_bytes(b"".join(changed[change]))
    asked.calls = 0
    assert scored(tiny_bundle, QUESTIONS, log) == plain
    assert len(log.read_bytes().splitlines()) == len(lines)
    _, *rows = map(json.loads, log.read_text().splitlines())
    assert [row["answer"] for row in rows if row["system"] == FULL] == plain[FULL, None].texts
