"""Hashes of the questions and passages that English bundles are scored with, and must not train on.

The sets are XQuAD's English part, half of SQuAD 2.0's development set, and parts of HotpotQA's and MuSiQue's. Their
hashes come with the package, so the check needs none of those files. It only runs if a recipe asks for it.

A passage counts as held out if it is one of these, or shares two or more of their sampled runs of 13 words: about
three copied sentences, whatever is around them. A question counts if its words are those of a held-out question.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ctx_compress_rag.data.examples import SUMMARY_REQUEST, Example, read_jsonl
from ctx_compress_rag.errors import DataError, shown

FILE = Path(__file__).with_name("held_out.npz")

_RUN = 13  # words; GPT-3's and later contamination checks use the same
_SAMPLED = 16  # one run in 16 is kept, chosen by its hash: of two texts that share a run, both keep it or neither does
_SHARED = 2
_NOT_WORDS = re.compile(r"\W+")
_ARRAYS = ("questions", "passages", "runs")


class HeldOut:
    """Hashes of questions, of whole passages, and of sampled runs of words in passages."""

    def __init__(self, questions: Iterable[int], passages: Iterable[int], runs: Iterable[int]) -> None:
        self.questions, self.passages, self.runs = frozenset(questions), frozenset(passages), frozenset(runs)

    @classmethod
    def of(cls, examples: Sequence[Example]) -> HeldOut:
        """Hash these examples, to hold them out."""
        passages = list(dict.fromkeys(p for e in examples for p in e.passages))
        # Files with several passages per question put a title on a line before the text: hash the text without it, too.
        passages += [p.split("\n", 1)[1] for p in passages if "\n" in p]
        return cls(
            (_hash(_words(t.question)) for e in examples for t in e.turns if t.question != SUMMARY_REQUEST),
            (_hash(_words(p)) for p in passages),
            (run for p in passages for run in _runs(p)),
        )

    @classmethod
    def read(cls, path: Path) -> HeldOut:
        """Read hashes that `write` wrote."""
        with np.load(path) as arrays:
            return cls(*(arrays[name].tolist() for name in _ARRAYS))

    def write(self, path: Path) -> None:
        """Write the hashes."""
        arrays = {name: np.array(sorted(getattr(self, name)), dtype=np.uint64) for name in _ARRAYS}
        np.savez(path, **arrays)  # type: ignore[arg-type]

    def has_passage(self, text: str) -> bool:
        """Whether a text is a held-out passage, or contains much of one."""
        return _hash(_words(text)) in self.passages or len(self.runs.intersection(_runs(text))) >= _SHARED

    def has_question(self, question: str) -> bool:
        """Whether a question is a held-out one."""
        words = _words(question)
        return bool(words) and _hash(words) in self.questions

    def shares(self, example: Example) -> bool:
        """Whether an example has a held-out passage or question."""
        return any(map(self.has_passage, example.passages)) or any(self.has_question(t.question) for t in example.turns)

    def check(self, examples: Iterable[Example], source: object) -> None:
        """Refuse training data with a held-out passage or question.

        Raises:
            DataError: there is one; the message names the first, and the `source` of the examples.
        """
        for example in filter(self.shares, examples):
            first = next((p for p in example.passages if self.has_passage(p)), example.turns[0].question)
            raise DataError(
                f"{source} holds a passage or question of the sets that English bundles are scored with: "
                f"{shown(first)}; remove such examples, or set data.leave_out_held_out: true instead of "
                "refuse_held_out"
            )


@cache
def held_out() -> HeldOut:
    """The hashes that come with the package."""
    return HeldOut.read(FILE)


def _words(text: str) -> list[str]:
    return _NOT_WORDS.sub(" ", text.lower()).split()


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


_word = cache(_digest)


def _hash(words: Sequence[str]) -> int:
    return _digest(" ".join(words))


@lru_cache(maxsize=65_536)  # a passage is checked by several guards, and once for each question about it
def _runs(text: str) -> tuple[int, ...]:
    """Hashes of the sampled runs of words: a polynomial in the words' hashes, modulo 2 to the 64."""
    ids = np.array([_word(word) for word in _words(text)], dtype=np.uint64)
    count = len(ids) - _RUN + 1
    if count <= 0:
        return ()
    runs = np.zeros(count, dtype=np.uint64)
    for place in range(_RUN):
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + ids[place : place + count]
    # The product's lowest bits depend only on the words' lowest bits, its highest bits on all of them.
    return tuple(np.unique(runs[(runs >> np.uint64(32)) % np.uint64(_SAMPLED) == 0]).tolist())


if __name__ == "__main__":  # `python -m benchmarks.datasets.held_out FILE ...` rewrites the package's hashes
    HeldOut.of([example for file in sys.argv[1:] for example in read_jsonl(file, unanswerable=True)]).write(FILE)
