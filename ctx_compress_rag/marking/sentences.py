"""Compare each sentence of the retrieved passages with the question."""

from __future__ import annotations

from collections.abc import Sequence

from ctx_compress_rag.marking.budget import Sentence
from ctx_compress_rag.models.sentence_embedding import question_vectors
from ctx_compress_rag.store.sentences import sentence_vectors, sentences_of, unpack


def nearest(texts: Sequence[str], question: str, stored: Sequence[str] | None = None) -> list[list[Sentence]]:
    """Return the sentences of each text, in order, with their similarity to the question.

    `stored` has, for each text, its sentences' vectors as the store keeps them, or "" (the default) to encode them
    now. Raises MissingExtraError without the extra `sentences`.
    """
    parts = [sentences_of(text) for text in texts]
    vectors = [unpack(packed, len(own)) for packed, own in zip(stored or [""] * len(texts), parts, strict=True)]
    missing = [place for place, own in enumerate(vectors) if own is None]
    for place, made in zip(missing, sentence_vectors([texts[place] for place in missing]), strict=True):
        vectors[place] = made
    [asked] = question_vectors([question])
    similarities = [[] if own is None else (own @ asked).tolist() for own in vectors]
    return [list(map(Sentence, own, near)) for own, near in zip(parts, similarities, strict=True)]
