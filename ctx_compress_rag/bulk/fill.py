"""A stream of passages into what stores them: only what is missing is compressed, in batches of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ctx_compress_rag.stores.passages import Passage, passage_batches

if TYPE_CHECKING:
    from ctx_compress_rag.stores import SoftContextStore

LOOKED_UP = 250
"""Passages that are looked up together: what Chroma answers in one query."""


class Added(NamedTuple):
    """Passages compressed and stored now, and passages that were there before."""

    added: int
    unchanged: int


class Target(Protocol):
    """Where compressed passages go."""

    def missing(self, passages: Sequence[Passage]) -> list[Passage]:
        """Those that are not stored yet, at most 250 at a time."""
        ...

    def put(self, passages: Sequence[Passage], made: Mapping[str, Any]) -> None:
        """Store passages with the columns that `CompressPassages` made of them."""
        ...


class Soft:
    """A `Target` of soft contexts alone, for passages whose app keeps its own vectors."""

    def __init__(self, store: SoftContextStore) -> None:
        self.put = store.put
        self._store = store

    def missing(self, passages: Sequence[Passage]) -> list[Passage]:
        held = self._store.has([p.text for p in passages], [str(p.id) for p in passages])
        return [passage for passage, there in zip(passages, held, strict=True) if not there]


def fill(
    target: Target, passages: Iterable[Passage], compress: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Iterator[Added]:
    """Compress and store what is missing; what is yielded is on disk, and counts since the last one.

    No more than `LOOKED_UP` passages are held at a time. After an interruption the same call resumes with what is
    missing.
    """
    for unchanged, batches in lookups(target, passages):
        for batch in batches:
            made = compress(columns(batch))
            target.put(list(batch.values()), made)
            yield Added(len(batch), unchanged)
            unchanged = 0
        if unchanged:
            yield Added(0, unchanged)


def lookups(target: Target, passages: Iterable[Passage]) -> Iterator[tuple[int, Iterator[dict[str, Passage]]]]:
    """Of each group of passages, in order, how many are stored, and the others by id, in batches to compress."""
    stream = iter(passages)
    while group := list(islice(stream, LOOKED_UP)):
        missing = target.missing(group)
        yield len(group) - len(missing), passage_batches({str(passage.id): passage for passage in missing}, LOOKED_UP)


def columns(batch: Mapping[str, Passage]) -> dict[str, list[str]]:
    """A batch as `CompressPassages` takes it."""
    return {"id": list(batch), "text": [passage.text for passage in batch.values()]}


def total(parts: Iterable[Added]) -> Added:
    """The sum."""
    return reduce(
        lambda one, other: Added(one.added + other.added, one.unchanged + other.unchanged), parts, Added(0, 0)
    )


def shown(parts: Iterable[Added], bar: Any) -> Iterator[Added]:
    """The parts, each counted on a progress bar of passages."""
    for part in parts:
        bar.update(sum(part))
        yield part
