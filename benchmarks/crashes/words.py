"""A small deterministic bundle: hashed word vectors, truly mean-pooled. The store's tests use it, too."""

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ctx_compress_rag.methods.base.compressor import PassageSlots, mean_pool_slots
from ctx_compress_rag.methods.base.rendering import PassageRenderer
from ctx_compress_rag.soft_context import SoftContext, check_ratio_divides_window


def word_vectors(text: str, dim: int) -> torch.Tensor:
    """(words, dim): one fixed vector per word."""
    rows = [np.frombuffer(hashlib.shake_128(word.encode()).digest(dim), np.int8) for word in text.split()]
    return torch.from_numpy(np.stack(rows).astype(np.float32) / 32)


class Merging(PassageRenderer):
    """Slots that can be merged."""

    nestable = True


class WordBundle:
    """Compresses words as a bundle compresses tokens; `calls` holds every batch it was given."""

    def __init__(self, name: str = "words", base_ratio: int = 4, dim: int = 8, nestable: bool = True) -> None:
        self.config = SimpleNamespace(name=name, base_ratio=base_ratio, text_share=None)
        self.compressor = Merging() if nestable else PassageRenderer()
        self.fingerprint = hashlib.sha256(f"{name}/{base_ratio}/{dim}".encode()).hexdigest()
        self.dim = dim
        self.calls: list[list[str]] = []

    def check_ratio(self, ratio: int) -> None:
        """Any up to 4096."""
        check_ratio_divides_window(ratio, 4096)

    def compress(self, texts: Sequence[str], ratio: int | None = None) -> list[SoftContext]:
        """A soft context for each text."""
        self.calls.append(list(texts))
        return [self.at(text, ratio or self.config.base_ratio) for text in texts]

    def at(self, text: str, ratio: int) -> SoftContext:
        """The soft context of a text pooled at a ratio directly, for comparison."""
        vectors = word_vectors(text, self.dim)
        pooled = mean_pool_slots(vectors, torch.ones(len(vectors), dtype=torch.int64), ratio)
        return PassageSlots(*pooled).soft_context()


WORDS: Any = WordBundle()  # for a store, which is typed for a Bundle


def passage(n: int, words: int = 30) -> str:
    """The n-th passage, `words` words long."""
    return " ".join(f"w{n}x{i}" for i in range(words))
