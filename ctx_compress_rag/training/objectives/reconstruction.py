"""Passages reconstructed from their slots (ArcAligner, section 3.5, stage I; xRAG's paraphrase pretraining).

The loss is `LikelihoodLoss`; the answers are the passages' own text (eq. 10).
"""

from __future__ import annotations

from collections.abc import Sequence

from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.training.objectives.likelihood import AnswerCollator


def recited(passage: str) -> Example:
    """A passage as its own answer."""
    return Example((passage,), (Turn("", (passage,)),))


def passages_of(examples: Sequence[Example]) -> list[Example]:
    """The distinct passages of examples, each as an example of its own, in order; questions are left out."""
    return [recited(passage) for passage in dict.fromkeys(p for e in examples for p in e.passages)]


class ReconstructionCollator(AnswerCollator):
    """Examples of one passage each -> the arguments of `LikelihoodLoss`: the passage itself is the answer.

    The builder limits the answer's length; a prompt is drawn for each passage.
    """

    def asked(self, example: Example, texts: Sequence[str]) -> Example:
        """The shortened passage, to be reconstructed."""
        [text] = texts
        return recited(text)
