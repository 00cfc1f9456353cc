"""Passages cut into equal segments, some kept as text and some skimmed (Read As Human, section 3)."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Self

from torch import Tensor

from ctx_compress_rag.methods.base.compressor import PassageSlots
from ctx_compress_rag.text.tokenizing import text_tokens

# Thai to Burmese and Khmer, kana, Han and its extensions.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_SPACED_LETTER = rf"[^\W{_UNSPACED}]"


@dataclass(frozen=True)
class SegmentRun:
    """Neighboring segments, from `start` to `end` (exclusive), that are all `kept` as text or all skimmed."""

    kept: bool
    start: int
    end: int


@dataclass(frozen=True)
class RamSegments:
    """A passage cut into segments of equal length in tokens, except perhaps the last; no segment spans two passages."""

    text: str
    ids: list[list[int]]  # of each segment
    bounds: list[int]  # where the text of each segment begins in `text`, and where the last one ends

    @classmethod
    def of(cls, tokenizer: Any, text: str, size: int) -> Self:
        """Cut a passage into segments of `size` tokens.

        The cuts are counted from the first token of the passage, so that they are the same as when it was stored. The
        decoder's tokenizer must be a fast one, because offsets are needed.
        """
        tokens = text_tokens(tokenizer, text)
        ids = tokens.ids
        # A segment's text begins where the token before it ends: a space goes with the word that follows.
        ends = [end for _, end in tokens.offsets]
        starts = range(0, len(ids), size)
        bounds = [0 if start == 0 else ends[start - 1] for start in starts]
        return cls(text, [ids[start : start + size] for start in starts], [*bounds, len(text)])

    @property
    def token_count(self) -> int:
        return sum(self.token_counts)

    @property
    def token_counts(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    def span(self, run: SegmentRun) -> tuple[int, int]:
        return self.bounds[run.start], self.bounds[run.end]

    def text_of(self, run: SegmentRun) -> str:
        return self.text[slice(*self.span(run))]

    def holding_answers(self, answers: Sequence[str]) -> list[bool]:
        """Return for each segment whether it holds an answer or a part of one, as whole words, in upper or lower case.

        In scripts without spaces between words, such as Chinese and Japanese, a match may be anywhere.
        """
        return self._matching(_whole_words(answer.strip()) for answer in answers if answer.strip())

    def quoted(self, parts: Sequence[str]) -> list[bool]:
        """Return for each segment whether it holds one of these quotations or a part of one, matched exactly."""
        return self._matching(re.escape(part) for part in parts)

    def _matching(self, patterns: Iterable[str]) -> list[bool]:
        spans = [match.span() for pattern in patterns for match in re.finditer(pattern, self.text)]
        return [any(a < end and start < b for a, b in spans) for start, end in pairwise(self.bounds)]


def segment_runs(passages: Sequence[RamSegments], kept: Sequence[bool]) -> list[list[SegmentRun]]:
    """Return the runs of each passage of a prompt, in order (eq. 6); `kept` says for all segments which stay text."""
    done: list[list[SegmentRun]] = []
    start = 0
    for passage in passages:
        fates = kept[start : start + len(passage.ids)]
        groups = [(fate, list(members)) for fate, members in groupby(range(len(fates)), key=fates.__getitem__)]
        done.append([SegmentRun(fate, members[0], members[-1] + 1) for fate, members in groups])
        start += len(fates)
    return done


def slots_of_runs(vectors: Tensor, counts: Tensor, layouts: Sequence[Sequence[SegmentRun]]) -> list[PassageSlots]:
    """Return each skimmed run's slots, in order (empty if those segments are dropped); `layouts` is of `segment_runs`.

    Shape: (skimmed segments, dim) or (0, dim), source tokens of each (skimmed segments,)
    """
    sizes = [run.end - run.start if len(vectors) else 0 for runs in layouts for run in runs if not run.kept]
    pairs = zip(vectors.split(sizes), counts[: len(vectors)].split(sizes), strict=True)
    return [PassageSlots(slots, tokens) for slots, tokens in pairs]


def passages_with_holes(
    passages: Sequence[RamSegments], layouts: Sequence[Sequence[SegmentRun]], holes: Iterator[str]
) -> list[str]:
    """Return each passage as a prompt shows it: kept runs as text, the next of `holes` (a marker) for a skimmed run."""
    return [
        "".join(passage.text_of(run) if run.kept else next(holes) for run in runs)
        for passage, runs in zip(passages, layouts, strict=True)
    ]


def _whole_words(answer: str) -> str:
    """Return a pattern that finds the answer, but not inside a word."""
    before, after = (re.match(rf"[{_UNSPACED}]", edge) is None for edge in (answer[0], answer[-1]))
    found = rf"(?<!{_SPACED_LETTER}){re.escape(answer)}" if before else re.escape(answer)
    return rf"(?i){found}(?!{_SPACED_LETTER})" if after else f"(?i){found}"
