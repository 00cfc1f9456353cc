"""Find distractors, which are the passages nearest to a question's own that do not answer it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.models.sentence_embedding import passage_vectors
from ctx_compress_rag.text.answers import mentions_answer


class Neighbors:
    """A set of passages that finds the nearest neighbors of each by MiniLM; needs the extra `sentences`."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._passages = list(dict.fromkeys(passages))
        self._places = {passage: place for place, passage in enumerate(self._passages)}
        self._vectors = passage_vectors(self._passages)

    def of(self, passage: str, answers: Sequence[str]) -> Iterator[str]:
        """Yield the other passages that mention none of the answers, nearest first."""
        order = np.argsort(-(self._vectors @ self._vectors[self._places[passage]]), kind="stable")
        others = (self._passages[place] for place in order)
        return (other for other in others if other != passage and not mentions_answer(other, answers))

    def among(self, q: Question, count: int) -> Question:
        """Return the question with near passages added until it has `count`, in the same random order at every call."""
        others = (other for other in self.of(q.passages[0], q.answers) if other not in q.passages)
        added = [other for other, _ in zip(others, range(count - len(q.passages)), strict=False)]
        if not added:
            return q
        passages = [*q.passages, *added]
        random.Random(q.question).shuffle(passages)
        return replace(q, passages=tuple(passages))
