"""A small deterministic bundle for store tests: hashed word vectors, truly mean-pooled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from ctx_compress_rag.methods.base.reading import Reading
from ctx_compress_rag.ratios import check_window
from ctx_compress_rag.soft_context import SoftContext, pool
from ctx_compress_rag.store import AddReport, SoftContextStore

WRITE = """
import sys
from helpers.store import WordBundle, passage
from ctx_compress_rag.store import SoftContextStore
"""
"""The beginning of a program for `helpers.forked`."""


def word_vectors(text: str, dim: int) -> torch.Tensor:
    """(words, dim): one fixed vector per word."""
    rows = [np.frombuffer(hashlib.shake_128(word.encode()).digest(dim), np.int8) for word in text.split()]
    return torch.from_numpy(np.stack(rows).astype(np.float32) / 32)


class Merging(Reading):
    nestable = True


class WordBundle:
    """Compresses words as a bundle compresses tokens; `calls` holds every batch it was given."""

    def __init__(self, name: str = "words", base_ratio: int = 4, dim: int = 8, nestable: bool = True) -> None:
        self.config = SimpleNamespace(name=name, base_ratio=base_ratio)
        self.compressor = Merging() if nestable else Reading()
        self.fingerprint = hashlib.sha256(f"{name}/{base_ratio}/{dim}".encode()).hexdigest()
        self.dim = dim
        self.calls: list[list[str]] = []

    def check_ratio(self, ratio: int) -> None:
        check_window(ratio, 4096)

    def compress(self, texts: Sequence[str], ratio: int | None = None) -> list[SoftContext]:
        self.calls.append(list(texts))
        return [self.at(text, ratio or self.config.base_ratio) for text in texts]

    def at(self, text: str, ratio: int) -> SoftContext:
        """The soft context of a text pooled at a ratio directly, for comparison."""
        vectors = word_vectors(text, self.dim)
        return SoftContext(*pool(vectors, torch.ones(len(vectors), dtype=torch.int64), ratio))


def passage(n: int, words: int = 30) -> str:
    """The n-th passage, `words` words long."""
    return " ".join(f"w{n}x{i}" for i in range(words))


def assert_same(actual: SoftContext | None, expected: SoftContext, tolerance: float = 0.01) -> None:
    """Equal token counts, and slots equal up to a quantisation error (relative to their size)."""
    assert actual is not None
    assert actual.token_counts.tolist() == expected.token_counts.tolist()
    error = torch.linalg.norm(actual.slots - expected.slots) / torch.linalg.norm(expected.slots)
    assert error < tolerance


def add(store: SoftContextStore, n: int, start: int = 0) -> AddReport:
    """Add passages `start` to `start + n` under the ids p0, p1, and so on."""
    ids = [f"p{i}" for i in range(start, start + n)]
    return store.add([passage(i) for i in range(start, start + n)], ids, progress=False)
