"""Keep what a model is scored with (held-out data) out of its training data.

A training passage is left out if it is a held-out passage or shares enough text with one. Runs of 13 words are
compared, and of the training passage only the runs that begin at every eighth word; two equal runs are enough. So 29
copied words in a row always count, whatever stands around them. (GPT-3 and later checks also use 13 words.) A training
question is left out if it has the same words as a held-out question.
"""

import logging
import re
from collections.abc import Iterable, Sequence

from ctx_compress_rag.data.examples import SUMMARY_REQUEST, Example

logger = logging.getLogger(__name__)

_RUN, _STEP = 13, 8
_SHARED = 2
_NOT_WORDS = re.compile(r"\W+")


class HeldOut:
    """The questions and passages that a model is scored with, which its training must not see."""

    def __init__(self, examples: Iterable[Example] = ()) -> None:
        self.questions: set[str] = set()
        self.passages: set[str] = set()
        self.runs: set[str] = set()
        for example in examples:
            self.questions |= {_plain(turn.question) for turn in example.turns}
            for passage in example.passages:
                # In files of titled passages the title is the first line.
                self.passages |= {_plain(passage), _plain(passage.partition("\n")[2])}
                self.runs.update(_runs(passage, 1))
        # Blank questions belong to plain text; a request for a summary is the same for every text.
        self.questions -= {"", _plain(SUMMARY_REQUEST)}
        self.passages.discard("")

    def has_question(self, question: str) -> bool:
        return _plain(question) in self.questions

    def has_passage(self, text: str) -> bool:
        """Whether a text is a held-out passage, or shares enough text with one."""
        return _plain(text) in self.passages or sum(run in self.runs for run in _runs(text, _STEP)) >= _SHARED

    def without(self, examples: Sequence[Example], source: object, passages: bool = True) -> list[Example]:
        """Return the examples that share no question and no passage with held-out data; log how many are left out.

        `source` names the examples in the log message. If `passages` is False, only questions are compared, for data
        whose passages are all retrieved from one corpus.
        """
        shared = {p: self.has_passage(p) for e in examples for p in e.passages} if passages else {}
        kept = [
            e
            for e in examples
            if not any(shared.get(p) for p in e.passages) and not any(self.has_question(t.question) for t in e.turns)
        ]
        if left_out := len(examples) - len(kept):
            logger.warning(
                "%s: %d of %d examples left out: they share a question or passage with held-out data",
                source, left_out, len(examples),
            )  # fmt: skip
        return kept


def _words(text: str) -> list[str]:
    return _NOT_WORDS.sub(" ", text.lower()).split()


def _plain(text: str) -> str:
    return " ".join(_words(text))


def _runs(text: str, step: int) -> list[str]:
    words = _words(text)
    return [" ".join(words[start : start + _RUN]) for start in range(0, len(words) - _RUN + 1, step)]
