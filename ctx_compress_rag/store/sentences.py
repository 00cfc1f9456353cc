"""Vectors of a passage's sentences and lines, stored with it in 8 bits, so that no question has to wait for them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.models.sentence_embedding import embed_passages
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store.codec import decode_soft_context, encode_soft_context
from ctx_compress_rag.text.units import split_passage

Vectors = NDArray[np.float32]
_DIM = 384


def sentence_vectors(texts: Sequence[str]) -> list[Vectors]:
    """Return unit vectors (units, 384) of each text's units with their heads; MissingExtraError without `sentences`."""
    parts = [["\n".join(unit.path) for unit in split_passage(text)] for text in texts]
    flat = [part for own in parts for part in own]
    if not flat:
        return [np.zeros((0, _DIM), np.float32)] * len(parts)
    return np.split(embed_passages(flat), np.cumsum([len(own) for own in parts])[:-1])


def pack_sentence_vectors(vectors: Vectors) -> str:
    """Return vectors (units, 384) as text for a record, in 8 bits. The error of a cosine is below 0.01."""
    return encode_soft_context(SoftContext(vectors, np.ones(len(vectors), np.int64)))


def unpack_sentence_vectors(packed: str, count: int) -> Vectors | None:
    """Return vectors (count, 384), or None if `packed` is "" or has another number; PayloadError if it is damaged."""
    if not packed:
        return None
    vectors = decode_soft_context(packed).slots
    return vectors if len(vectors) == count else None
