"""Demonstrations: a question with its passages and its answer, and the chat made from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ctx_compress_rag.errors import ConfigError, short_repr
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, messages

if TYPE_CHECKING:
    from ctx_compress_rag.store import SoftContextStore


@dataclass(frozen=True)
class Demonstration:
    """One solved example of the task (x, D, y).

    Attributes:
        question: what was asked.
        passages: what was retrieved for it: texts, or markers of a store's soft contexts.
        answer: the answer as it should be given.
    """

    question: str
    passages: tuple[str, ...]
    answer: str

    def __post_init__(self) -> None:
        if isinstance(self.passages, str):  # a string is a sequence too, of one-letter passages
            raise ConfigError(
                f"a demonstration's passages are the string {short_repr(self.passages)}: give a tuple of strings"
            )

    def chat(self) -> list[dict[str, str]]:
        """The chat messages that ask the question about the passages, without the answer."""
        return messages(TEMPLATES[0], PASSAGE_SEPARATOR.join(self.passages), self.question)

    def marked(self, store: SoftContextStore, ratio: int | None = None) -> Demonstration:
        """The demonstration with soft contexts for passages; missing ones are compressed and stored now.

        Args:
            store: where the soft contexts are.
            ratio: source tokens per slot; None takes the store's base ratio.

        Raises:
            UnreadableMarkerError: a passage holds the marker of another store.
        """
        for passage in self.passages:
            store.split(passage, None, "error")
        return replace(self, passages=tuple(mark(store, self.passages, ratio=ratio)))
