"""Questions to score a bundle on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.text.answers import mentions_answer


@dataclass(frozen=True)
class Question:
    """A question with its passages; it has no accepted answers if the passages do not answer it."""

    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


def questions_of(examples: Sequence[Example], limit: int | None = None) -> list[Question]:
    """One question per turn, the first turns of all examples first, so that a limit spreads over examples."""
    turns = max(len(e.turns) for e in examples)
    questions = [
        Question(e.passages, e.turns[i].question, e.turns[i].answers)
        for i in range(turns)
        for e in examples
        if i < len(e.turns)
    ]
    return questions[:limit]


def with_other_passages(questions: Sequence[Question]) -> list[Question]:
    """Each question with the passages of another one, which share none with its own and do not answer it.

    Raises:
        DataError: for a question, no other one has such passages.
    """
    return [replace(q, passages=_elsewhere(questions, place)) for place, q in enumerate(questions)]


def _elsewhere(questions: Sequence[Question], place: int) -> tuple[str, ...]:
    own = questions[place]
    for other in (*questions[place + 1 :], *questions[:place]):
        if not set(own.passages) & set(other.passages) and not mentions_answer(" ".join(other.passages), own.answers):
            return other.passages
    raise DataError(f"no question has passages that do not answer {own.question!r}: give more questions")


def digest(questions: Sequence[Question]) -> str:
    """SHA-256 of questions with their passages and answers."""
    return hashlib.sha256(json.dumps([asdict(q) for q in questions]).encode()).hexdigest()
