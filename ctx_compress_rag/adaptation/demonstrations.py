"""Demonstrations: a question with its passages and its answer, and the chat made from it."""

from __future__ import annotations

from dataclasses import dataclass

from ctx_compress_rag.errors import ConfigError, short_repr
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, messages


@dataclass(frozen=True)
class Demonstration:
    """One solved example of the task (x, D, y).

    Attributes:
        question: what was asked.
        passages: the texts that were retrieved for it.
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
