"""The control of a comparison: questions with passages that do not answer them."""

from collections.abc import Sequence
from dataclasses import replace

from ctx_compress_rag.errors import DataError
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.text.answers import mentions_answer


def with_other_passages(questions: Sequence[Question]) -> list[Question]:
    """Each question with the passages of another one, which share none with its own and do not answer it.

    Raises:
        DataError: for a question, no other one has such passages.
    """
    return [replace(q, passages=_elsewhere(questions, place)) for place, q in enumerate(questions)]


def _elsewhere(questions: Sequence[Question], place: int) -> tuple[str, ...]:
    own = questions[place]
    for other in (*questions[place + 1 :], *questions[:place]):
        if not set(own.passages) & set(other.passages) and not mentions_answer(" ".join(other.passages), own.answers):
            return other.passages
    raise DataError(f"no question has passages that do not answer {own.question!r}: give more questions")
