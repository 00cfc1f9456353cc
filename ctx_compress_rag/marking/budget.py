"""What a prompt shows of the passages retrieved for a question, within one budget of its positions.

A passage is shown as slots, as its sentences nearest to the question, as both, or not at all.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ctx_compress_rag.errors import RatioError
from ctx_compress_rag.store.marker import MAX_FACTOR
from ctx_compress_rag.text.answers import CHARACTER

# Where a sentence that is too long may be cut: Chinese and Japanese have no spaces.
_WORD = re.compile(rf"{CHARACTER.pattern}|(?:(?!{CHARACTER.pattern})\S)+")


class Sentence(NamedTuple):
    """A sentence, and the cosine of its vector and the question's."""

    text: str
    similarity: float


@dataclass(frozen=True)
class Retrieved:
    """A retrieved passage."""

    text: str  # as a prompt may show it
    slots: int = 0  # that are stored of it; 0 if it must be shown as text
    sentences: Sequence[Sentence] = ()  # in order; none if there is no question

    def as_slots(self, factor: int) -> Shown:
        """All of it as slots, `factor` stored ones merged into each; as text if none are stored."""
        return Shown("", -(-self.slots // factor), factor) if self.slots else Shown(self.text)


class Shown(NamedTuple):
    """What is shown of a passage: text, then slots."""

    text: str = ""  # the whole, some sentences, or nothing
    slots: int = 0
    factor: int = 1  # how many stored slots are merged into each


NOTHING = Shown()
Count = Callable[[Sequence[Shown]], int]
"""Positions of the prompt that what is shown takes: text, slots, wrapping vectors and separators."""


class Budget:
    """Ways to spend a budget of `size` positions. Each returns what is shown of each passage, and never exceeds it.

    `nestable` is whether neighboring slots can be merged.
    """

    def __init__(self, passages: Sequence[Retrieved], size: int, count: Count, *, nestable: bool = True) -> None:
        self.passages = passages
        self.size = size
        self._count = count
        self._nestable = nestable

    def fits(self, shown: Sequence[Shown]) -> bool:
        """Whether it is within the budget."""
        return self._count(shown) <= self.size

    def texts(self) -> list[Shown]:
        """All texts, whether they fit or not."""
        return [Shown(passage.text) for passage in self.passages]

    def soft(self) -> list[Shown]:
        """All passages as slots, at the finest ratio that fits for all; RatioError if none does."""
        most = max((passage.slots for passage in self.passages), default=1)

        def at(factor: int) -> list[Shown]:
            return [passage.as_slots(factor) for passage in self.passages]

        factor = self._finest(at, most, self.size)
        if factor is None:
            raise RatioError(
                f"{len(self.passages)} passages do not fit into token_budget={self.size}: at the coarsest ratio they "
                f"take {self._count(at(most if self._nestable else 1))} tokens; retrieve fewer, or raise the budget"
            )
        return at(factor)

    def mixed(self, best: int, share: float) -> list[Shown]:
        """Sentences of all passages for a share (0 to 1) of the budget or more, slots of passage `best` for the rest.

        With 1, or if the slots do not fit into the rest, only sentences; RatioError if nothing fits.
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

    def with_sentences(self, shown: Sequence[Shown]) -> list[Shown]:
        """Add the sentences nearest to the question to what is shown, in their passages' order, while they fit.

        The first that does not fit is cut between words.
        """
        kept: list[dict[int, str]] = [{} for _ in shown]

        def fits() -> bool:
            return self.fits(_joined(shown, kept))

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
        return _joined(shown, kept)

    def _only(self, best: int, shown: Shown) -> list[Shown]:
        return [shown if place == best else NOTHING for place in range(len(self.passages))]

    def _finest(self, at: Callable[[int], list[Shown]], most: int, size: int) -> int | None:
        """The least factor at which what `at` shows takes at most `size` positions; None if there is none."""
        factors = range(1, min(max(most, 1), MAX_FACTOR) + 1) if self._nestable else [1]
        place = bisect_left(factors, True, key=lambda factor: self._count(at(factor)) <= size)
        return factors[place] if place < len(factors) else None


def _joined(shown: Sequence[Shown], kept: Sequence[dict[int, str]]) -> list[Shown]:
    return [
        each._replace(text=" ".join(own[place] for place in sorted(own))) if own else each
        for each, own in zip(shown, kept, strict=True)
    ]
