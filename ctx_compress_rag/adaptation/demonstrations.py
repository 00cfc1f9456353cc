"""Demonstrations: a question with its passages and its answer, and the chat messages made from them."""

from dataclasses import dataclass

from ctx_compress_rag.errors import ConfigError, short_repr
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, question_messages


@dataclass(frozen=True)
class Demonstration:
    """A solved example of the task, (x, D, y) in the paper.

    Attributes:
        question: the question.
        passages: the texts that were retrieved for the question.
        answer: the answer as the decoder should give it.
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
        """Return the chat messages that ask the question about the passages, without the answer."""
        return question_messages(TEMPLATES[0], PASSAGE_SEPARATOR.join(self.passages), self.question)
