"""Compress a stream of passages into a store: only missing ones, in batches of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ctx_compress_rag.store.passage import Passage, passage_batches

if TYPE_CHECKING:
    from ctx_compress_rag.store import SoftContextStore

LOOKED_UP = 250
"""How many passages are looked up together: as many as Chroma answers in one query."""


class Added(NamedTuple):
    """How many passages were compressed and stored now, and how many were stored before."""

    added: int
    unchanged: int


class Target(Protocol):
    """Where compressed passages go."""

    def missing(self, passages: Sequence[Passage]) -> list[Passage]:
        """The passages that are not stored yet; takes at most 250 at a time."""
        ...

    def put(self, passages: Sequence[Passage], made: Mapping[str, Any]) -> None:
        """Store passages with the columns that `CompressPassages` made from them."""
        ...


class Soft:
    """A `Target` for soft contexts only, if the app keeps its own vectors of the passages."""

    def __init__(self, store: SoftContextStore) -> None:
        self.put = store.put
        self._store = store

    def missing(self, passages: Sequence[Passage]) -> list[Passage]:
        held = self._store.has([p.text for p in passages], [str(p.id) for p in passages])
        return [passage for passage, there in zip(passages, held, strict=True) if not there]


def fill(
    target: Target, passages: Iterable[Passage], compress: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Iterator[Added]:
    """Compress and store missing passages; yield counts, batch by batch, once a batch is on disk.

    At most `LOOKED_UP` passages are in memory at a time. After an interruption, the same call resumes.
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
    """For each group of passages, in order: how many are stored, and the others by id, in batches to compress."""
    stream = iter(passages)
    while group := list(islice(stream, LOOKED_UP)):
        missing = target.missing(group)
        yield len(group) - len(missing), passage_batches({str(passage.id): passage for passage in missing}, LOOKED_UP)


def columns(batch: Mapping[str, Passage]) -> dict[str, list[str]]:
    """A batch in the form that `CompressPassages` takes."""
    return {"id": list(batch), "text": [passage.text for passage in batch.values()]}


def total(parts: Iterable[Added]) -> Added:
    """The sum of the counts."""
    return reduce(
        lambda one, other: Added(one.added + other.added, one.unchanged + other.unchanged), parts, Added(0, 0)
    )


def shown(parts: Iterable[Added], bar: Any) -> Iterator[Added]:
    """Yield the parts and count them on a progress bar of passages."""
    for part in parts:
        bar.update(sum(part))
        yield part
