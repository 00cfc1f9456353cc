"""Choose what a prompt shows of the passages retrieved for a question, within a budget of positions of the prompt.

A passage is shown as slots, as the sentences nearest to the question, as both, or not at all.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from ctx_compress_rag.errors import RatioError
from ctx_compress_rag.models.sentence_embedding import embed_questions
from ctx_compress_rag.store.marker import MAX_FACTOR
from ctx_compress_rag.store.record import sentence_vectors, unpack_sentence_vectors
from ctx_compress_rag.text.answers import CHARACTER
from ctx_compress_rag.text.sentences import split_passage
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR

# Where a sentence that is too long may be cut: Chinese and Japanese have no spaces.
_WORD = re.compile(rf"{CHARACTER.pattern}|(?:(?!{CHARACTER.pattern})\S)+")


class ScoredSentence(NamedTuple):
    """A sentence or line of a passage (a `PassageUnit`), and the cosine of its vector and the question's vector."""

    text: str
    similarity: float
    heads: tuple[str, ...] = ()
    line: bool = False


def nearest_sentences(
    texts: Sequence[str], question: str, stored: Sequence[str] | None = None
) -> list[list[ScoredSentence]]:
    """Return the sentences and lines of each text, in order, with their similarity to the question.

    `stored` has, for each text, its sentences' vectors as the store keeps them, or "" (the default) to encode them
    now. Raises MissingExtraError without the extra `sentences`.
    """
    parts = [split_passage(text) for text in texts]
    vectors = [
        unpack_sentence_vectors(packed, len(own))
        for packed, own in zip(stored or [""] * len(texts), parts, strict=True)
    ]
    missing = [place for place, own in enumerate(vectors) if own is None]
    for place, made in zip(missing, sentence_vectors([texts[place] for place in missing]), strict=True):
        vectors[place] = made
    [asked] = embed_questions([question])
    similarities = [[] if own is None else (own @ asked).tolist() for own in vectors]
    return [
        [ScoredSentence(unit.text, score, unit.heads, unit.line) for unit, score in zip(own, near, strict=True)]
        for own, near in zip(parts, similarities, strict=True)
    ]


@dataclass(frozen=True)
class RetrievedText:
    """A retrieved passage, with what a prompt can show of it."""

    text: str  # as a prompt may show it
    slots: int = 0  # how many are stored; 0 if the passage must be shown as text
    sentences: Sequence[ScoredSentence] = ()  # in order; none if there is no question

    def as_slots(self, factor: int) -> ShownPassage:
        """Return the whole passage as slots, each merged from `factor` stored ones, or as text if none are stored."""
        return ShownPassage("", -(-self.slots // factor), factor) if self.slots else ShownPassage(self.text)


class ShownPassage(NamedTuple):
    """What a prompt shows of a passage, first text, then slots; either may be missing."""

    text: str = ""  # the whole passage, some sentences, or nothing
    slots: int = 0
    factor: int = 1  # how many stored slots are merged into each


NOTHING = ShownPassage()
Count = Callable[[Sequence[ShownPassage]], int]
"""Counts the positions that shown passages take in a prompt (text, slots, the reader's vectors and separators)."""


class Budget:
    """Ways to show passages in `size` positions, by `count`; `nestable` is whether neighboring slots can be merged."""

    def __init__(self, passages: Sequence[RetrievedText], size: int, count: Count, *, nestable: bool = True) -> None:
        self.passages = passages
        self.size = size
        self._count = count
        self._nestable = nestable

    def fits(self, shown: Sequence[ShownPassage]) -> bool:
        """Whether what is shown takes at most the budget."""
        return self._count(shown) <= self.size

    def texts(self) -> list[ShownPassage]:
        """Return all passages as text, whether they fit the budget or not."""
        return [ShownPassage(passage.text) for passage in self.passages]

    def soft(self) -> list[ShownPassage]:
        """Return all passages as slots, at the finest ratio at which all fit. Raise RatioError if there is none."""
        most = max((passage.slots for passage in self.passages), default=0)

        def at(factor: int) -> list[ShownPassage]:
            return [passage.as_slots(factor) for passage in self.passages]

        factor = self._finest(at, most, self.size)
        if factor is None:
            raise RatioError(
                f"{len(self.passages)} passages do not fit into token_budget={self.size}: at the coarsest ratio they "
                f"take {self._count(at(most if self._nestable else 1))} tokens; retrieve fewer, or raise the budget"
            )
        return at(factor)

    def mixed(self, best: int, share: float) -> list[ShownPassage]:
        """Return slots of passage `best` in at most 1 - `share` of the budget, and sentences of all in what is left.

        If `share` is 1 or no slots fit, there are only sentences. Raises RatioError if nothing fits.
        """
        shown = [NOTHING] * len(self.passages)
        if share < 1 and (passage := self.passages[best]).slots:
            rest = int(self.size * (1 - share))
            factor = self._finest(lambda f: self._only(best, passage.as_slots(f)), passage.slots, rest)
            if factor is not None:
                shown = self._only(best, passage.as_slots(factor))
        shown = self.with_sentences(shown)
        if not any(each.text or each.slots for each in shown):
            raise RatioError(f"token_budget={self.size} holds nothing of {len(shown)} passages: raise it")
        return shown

    def with_sentences(self, shown: Sequence[ShownPassage]) -> list[ShownPassage]:
        """Return what is shown with sentences added, the nearest to the question first, while they fit the budget.

        Sentences of a passage keep their order. The first sentence that does not fit is cut between words.
        """
        kept: list[dict[int, str]] = [{} for _ in shown]

        def fits() -> bool:
            return self.fits(self._joined(shown, kept))

        ranked = [
            (-sentence.similarity, passage, place)
            for passage, each in enumerate(self.passages)
            for place, sentence in enumerate(each.sentences)
        ]
        for _, passage, place in sorted(ranked):
            text = kept[passage][place] = self.passages[passage].sentences[place].text
            if fits():
                continue
            ends = [match.end() for match in _WORD.finditer(text)]

            def too_long(end: int, passage: int = passage, place: int = place, text: str = text) -> bool:
                kept[passage][place] = text[:end]
                return not fits()

            if words := bisect_left(ends, True, key=too_long):
                kept[passage][place] = text[: ends[words - 1]]
            else:
                del kept[passage][place]
            break
        return self._joined(shown, kept)

    def _joined(self, shown: Sequence[ShownPassage], kept: Sequence[dict[int, str]]) -> list[ShownPassage]:
        """Return what is shown with the kept sentences, and a blank line, over which no answer quotes, at each gap.

        Lines stand below their heads, of which those that are above the line before, too, are not repeated.
        """
        joined = []
        for each, passage, own in zip(shown, self.passages, kept, strict=True):
            text, above = "", tuple[str, ...]()
            for place in sorted(own):
                unit = passage.sentences[place]
                follows = place > 0 and own.get(place - 1) == passage.sentences[place - 1].text
                text += "" if not text else PASSAGE_SEPARATOR if not follows else "\n" if unit.line else " "
                known = len([*takewhile(lambda pair: pair[0] == pair[1], zip(above, unit.heads, strict=False))])
                text += "\n".join((*unit.heads[known:], own[place]))
                above = (*unit.heads, own[place])
            joined.append(each._replace(text=text.strip()) if own else each)
        return joined

    def _only(self, best: int, shown: ShownPassage) -> list[ShownPassage]:
        return [shown if place == best else NOTHING for place in range(len(self.passages))]

    def _finest(self, at: Callable[[int], list[ShownPassage]], most: int, size: int) -> int | None:
        """Return the least factor at which what `at` shows takes at most `size` positions; None if there is none."""
        factors = range(1, min(max(most, 1), MAX_FACTOR) + 1) if self._nestable else [1]
        place = bisect_left(factors, True, key=lambda factor: self._count(at(factor)) <= size)
        return factors[place] if place < len(factors) else None
