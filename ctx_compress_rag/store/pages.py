"""Split long lists into parts that Chroma or SQLite accepts in one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

READ_IDS = 250  # Chroma fails with tens of thousands of ids in one query
WRITE_RECORDS = 250  # its ingestion is fastest with 100 to 250


def pages(values: list[T], size: int = READ_IDS) -> Iterator[list[T]]:
    """The values in order, `size` at a time."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
