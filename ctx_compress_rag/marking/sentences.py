"""How near each sentence of the retrieved passages is to the question."""

from __future__ import annotations

from collections.abc import Sequence

from ctx_compress_rag.marking.budget import Sentence
from ctx_compress_rag.models.sentence_embedding import passage_vectors, question_vectors
from ctx_compress_rag.text.sentences import sentences


def nearest(texts: Sequence[str], question: str) -> list[list[Sentence]]:
    """The sentences of each text, in order, without space around them, each with its similarity to the question.

    Raises:
        MissingExtraError: the `index` extra, which has the splitter and MiniLM, is not installed.
    """
    parts = [list(filter(None, map(str.strip, sentences(text)))) for text in texts]
    flat = [part for own in parts for part in own]
    if not flat:
        return [[] for _ in texts]
    similarities = iter((passage_vectors(flat) @ question_vectors([question])[0]).tolist())
    return [[Sentence(part, next(similarities)) for part in own] for own in parts]
