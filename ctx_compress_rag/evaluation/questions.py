"""Questions to score a bundle on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ctx_compress_rag.data.examples import Example


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


def digest(questions: Sequence[Question]) -> str:
    """SHA-256 of questions with their passages and answers."""
    return hashlib.sha256(json.dumps([asdict(q) for q in questions]).encode()).hexdigest()
