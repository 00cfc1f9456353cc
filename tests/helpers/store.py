"""What tests of stores share."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.crashes.words import WordBundle, passage
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import AddReport, SoftContextStore

WRITE = """
import sys
from helpers.store import WordBundle, passage
from ctx_compress_rag.store import SoftContextStore
"""
"""The beginning of a program for `helpers.forked`."""

__all__ = ["WRITE", "WordBundle", "add", "assert_same", "full_disk", "passage"]


def assert_same(actual: SoftContext | None, expected: SoftContext, tolerance: float = 0.01) -> None:
    """Equal token counts, and slots equal up to a quantization error (relative to their size)."""
    assert actual is not None
    assert actual.token_counts.tolist() == expected.token_counts.tolist()
    error = np.linalg.norm(actual.slots - expected.slots) / np.linalg.norm(expected.slots)
    assert error < tolerance


def add(store: SoftContextStore, n: int, start: int = 0) -> AddReport:
    """Add passages `start` to `start + n` under the ids p0, p1, and so on."""
    ids = [f"p{i}" for i in range(start, start + n)]
    return store.add([passage(i) for i in range(start, start + n)], ids, progress=False)


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file grows beyond `limit` bytes: to whoever writes it the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
