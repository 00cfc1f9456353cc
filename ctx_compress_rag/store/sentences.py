"""Vectors of a passage's sentences, stored with it in 8 bits, so that no question has to encode them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ctx_compress_rag.models.sentence_embedding import passage_vectors
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store.codec import decode, encode
from ctx_compress_rag.text.sentences import sentences

Vectors = NDArray[np.float32]
_DIM = 384


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, without space around them and blank ones."""
    return [part for part in map(str.strip, sentences(text)) if part]


def sentence_vectors(texts: Sequence[str]) -> list[Vectors]:
    """For each text the unit vectors (sentences, 384) of its sentences, with the extra `sentences`."""
    parts = [sentences_of(text) for text in texts]
    flat = [part for own in parts for part in own]
    if not flat:
        return [np.zeros((0, _DIM), np.float32)] * len(parts)
    return np.split(passage_vectors(flat), np.cumsum([len(own) for own in parts])[:-1])


def pack(vectors: Vectors) -> str:
    """Vectors as text for a record; the error of a cosine is below 0.01."""
    return encode(SoftContext(torch.from_numpy(vectors), torch.ones(len(vectors), dtype=torch.int64)))


def unpack(packed: str, count: int) -> Vectors | None:
    """The vectors of so many sentences; None if others, or none, were packed."""
    if not packed:
        return None
    vectors: Vectors = decode(packed).slots.numpy()
    return vectors if len(vectors) == count else None
