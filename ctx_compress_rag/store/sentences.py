"""Vectors of a passage's sentences, stored with it in 8 bits, so that no question has to encode them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.models.sentence_embedding import passage_vectors
from ctx_compress_rag.text.sentences import sentences

Vectors = NDArray[np.float32]
DIM = 384
"""MiniLM's."""


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, without space around them and blank ones.

    Raises:
        MissingExtraError: the `sentences` extra is not installed.
    """
    return [part for part in map(str.strip, sentences(text)) if part]


def sentence_vectors(texts: Sequence[str]) -> list[Vectors]:
    """For each text the unit vectors (sentences, 384) of its sentences.

    Raises:
        MissingExtraError: the `sentences` extra, which has MiniLM, is not installed.
    """
    parts = [sentences_of(text) for text in texts]
    flat = [part for own in parts for part in own]
    vectors = passage_vectors(flat) if flat else np.zeros((0, DIM), np.float32)
    if not parts:
        return []
    return np.split(vectors, np.cumsum([len(own) for own in parts])[:-1])


def pack(vectors: Vectors) -> str:
    """Vectors as text for a record: int8, with a scale for each; the error of a cosine is below 0.01."""
    scales = np.abs(vectors).max(axis=1, initial=1e-6).astype(np.float32)
    rounded = np.round(vectors / scales[:, None] * 127).astype(np.int8)
    return base64.b64encode(scales.tobytes() + rounded.tobytes()).decode("ascii")


def unpack(packed: str, count: int) -> Vectors | None:
    """The vectors of so many sentences; None if others, or none, were packed."""
    try:
        data = base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError):
        return None
    if not count or len(data) != count * (4 + DIM):
        return None
    scales = np.frombuffer(data[: 4 * count], np.float32)
    rounded = np.frombuffer(data[4 * count :], np.int8).reshape(count, DIM)
    return rounded.astype(np.float32) * (scales[:, None] / np.float32(127))
