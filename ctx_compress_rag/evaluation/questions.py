"""Define the questions that a bundle is scored on, and find passages to put beside their own (distractors)."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.models.sentence_embedding import embed_passages
from ctx_compress_rag.text.answers import mentions_answer


@dataclass(frozen=True)
class Question:
    """A question with its passages and accepted answers (none if the passages do not answer the question)."""

    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


def questions_of(examples: Sequence[Example], limit: int | None = None) -> list[Question]:
    """Return a question for each turn, at most `limit` (None: all), all examples' first turns before later ones."""
    turns = max(len(e.turns) for e in examples)
    questions = [
        Question(e.passages, e.turns[i].question, e.turns[i].answers)
        for i in range(turns)
        for e in examples
        if i < len(e.turns)
    ]
    return questions[:limit]


def questions_digest(questions: Sequence[Question]) -> str:
    """Return the SHA-256 of questions with their passages and answers, in hex digits."""
    return hashlib.sha256(json.dumps([asdict(q) for q in questions]).encode()).hexdigest()


class NeighborPassages:
    """A set of passages that finds the nearest neighbors of each by MiniLM; needs the extra `sentences`."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._passages = list(dict.fromkeys(passages))
        self._places = {passage: place for place, passage in enumerate(self._passages)}
        self._vectors = embed_passages(self._passages)

    def of(self, passage: str, answers: Sequence[str]) -> Iterator[str]:
        """Yield the set's passages that mention none of the answers, nearest to `passage` (in the set) first."""
        order = np.argsort(-(self._vectors @ self._vectors[self._places[passage]]), kind="stable")
        near = (self._passages[place] for place in order)
        return (each for each in near if not mentions_answer(each, answers))

    def among(self, q: Question, count: int) -> Question:
        """Return the question with neighbors of its first passage, up to `count` in all, always in one random order."""
        others = (other for other in self.of(q.passages[0], q.answers) if other not in q.passages)
        added = [other for other, _ in zip(others, range(count - len(q.passages)), strict=False)]
        if not added:
            return q
        passages = [*q.passages, *added]
        random.Random(q.question).shuffle(passages)
        return replace(q, passages=tuple(passages))
