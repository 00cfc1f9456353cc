"""Define the questions that a bundle is scored on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ctx_compress_rag.data.examples import Example


@dataclass(frozen=True)
class Question:
    """A question with its passages and accepted answers (none if the passages do not answer the question)."""

    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


def questions_of(examples: Sequence[Example], limit: int | None = None) -> list[Question]:
    """Return a question for each turn, first turns of all examples first, so that a limit spreads over examples."""
    turns = max(len(e.turns) for e in examples)
    questions = [
        Question(e.passages, e.turns[i].question, e.turns[i].answers)
        for i in range(turns)
        for e in examples
        if i < len(e.turns)
    ]
    return questions[:limit]


def digest(questions: Sequence[Question]) -> str:
    """Return the SHA-256 of questions with their passages and answers, in hex digits."""
    return hashlib.sha256(json.dumps([asdict(q) for q in questions]).encode()).hexdigest()
