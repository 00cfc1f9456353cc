"""Questions with the passages of others: the control of `compare`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.compare.control import with_other_passages
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.evaluation.questions import Question

PASSAGES = ("Anna was born in Bonn.", "Bert lives in Rome.", "The Anna sails to Bonn.", "Carl met Anna.")
QUESTIONS = st.builds(
    Question,
    st.lists(st.sampled_from(PASSAGES), min_size=1, max_size=2, unique=True).map(tuple),
    st.sampled_from(("Where?", "Who?")),
    st.lists(st.sampled_from(("Bonn", "Rome", "Carl")), min_size=1, max_size=2, unique=True).map(tuple),
)


@given(st.lists(QUESTIONS, min_size=1, max_size=6))
def test_other_passages_are_real_ones_without_the_answer(questions: list[Question]) -> None:
    def other(own: Question, q: Question) -> bool:
        apart = not set(own.passages) & set(q.passages)
        return apart and not any(answer in " ".join(q.passages) for answer in own.answers)

    possible = all(any(other(own, q) for q in questions) for own in questions)
    if not possible:
        with pytest.raises(DataError, match="no question has passages that do not answer"):
            with_other_passages(questions)
        return
    moved = with_other_passages(questions)
    assert [(q.question, q.answers) for q in moved] == [(q.question, q.answers) for q in questions]
    for own, q in zip(questions, moved, strict=True):
        assert any(q.passages == there.passages and other(own, there) for there in questions)
