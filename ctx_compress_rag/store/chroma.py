"""Chroma's client behind one boundary: whatever it raises or answers becomes what was asked for, or a StoreError."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from chromadb.api import ClientAPI
from chromadb.errors import NotFoundError

from ctx_compress_rag.errors import CtxCompressError, StoreError, StoreWriteError, short_repr

T = TypeVar("T")
Row = dict[str, Any]
"""The metadata of a record."""

Found = tuple[str, str, Row, float]
"""A search result: id, document, metadata, distance."""

PAGE = 250
"""Records in one call: Chroma fails with tens of thousands of ids, and writes fastest with 100 to 250."""
_KINDS: Any = {
    "ids": str,
    "documents": str | None,
    "metadatas": Mapping | None,
    "distances": float,
    "embeddings": object,
}
_ROOM = 32 << 20
"""Bytes that must be free before a write: twice what Chroma was measured to need for the largest of this library."""
_PROBE_BYTES = 1 << 20


def pages(values: Sequence[T], size: int = PAGE) -> Iterator[Sequence[T]]:
    """The values in order, `size` at a time."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def batches(values: Mapping[str, T], size: Callable[[T], int], limit: int) -> Iterator[dict[str, T]]:
    """The values in order, at most `PAGE` at a time, with sizes of at most `limit` together; a larger one alone."""
    batch: dict[str, T] = {}
    total = 0
    for key, value in values.items():
        if batch and (len(batch) == PAGE or total + size(value) > limit):
            yield batch
            batch, total = {}, 0
        batch[key] = value
        total += size(value)
    if batch:
        yield batch


class Chroma:
    """A client of Chroma.

    Args:
        client: the client.
        where: its address, for messages.
        folder: the folder of an embedded engine; None for a server or memory.
    """

    def __init__(self, client: ClientAPI, where: str, folder: Path | None = None) -> None:
        self.where = where
        self._client = client
        self._folder = folder

    def find(self, name: str) -> Records | None:
        """The records of a collection; None if there is none of this name."""
        with explained(self.where, self._folder):
            try:
                collection = self._client.get_collection(name, embedding_function=None)
                return Records(collection, self.where, self._folder)
            except (NotFoundError, UnicodeEncodeError):  # the latter for a name that is not UTF-8
                return None

    def create(self, name: str, configuration: Any, metadata: Mapping[str, Any]) -> Records:
        """A new collection, or the one of this name that another client has made meanwhile."""
        with explained(self.where, self._folder, writing=True):
            collection = self._client.get_or_create_collection(
                name, configuration=configuration, metadata=dict(metadata), embedding_function=None
            )
            return Records(collection, self.where, self._folder)

    def close(self) -> None:
        """Close the engine."""
        self._client.close()  # type: ignore[attr-defined]  # of Client, but not of ClientAPI


class Records:
    """The records of a collection. Every method raises StoreError for whatever Chroma raises, or answers beside it.

    Attributes:
        name: the collection's name.
        metadata: the collection's metadata.
    """

    def __init__(self, collection: Any, where: str, folder: Path | None = None) -> None:
        self.where = where
        self._folder = folder
        self._collection = collection
        with explained(where, folder):
            self.name = str(collection.name)
            [about] = self._column({"metadatas": [collection.metadata]}, "metadatas")
            self.metadata: Row = dict(about or {})

    def count(self) -> int:
        """How many records there are."""
        count = self._ask("count")
        if type(count) is not int or count < 0:
            raise self._odd(f"{short_repr(count)} as a count")
        return count

    def ids(self) -> list[str]:
        """The ids of all records."""
        return [id for (id,) in self._get(None)]

    def existing(self, ids: Sequence[str]) -> list[str]:
        """Those of the ids, at most `PAGE`, that have a record."""
        return [id for (id,) in self._get(ids)]

    def matching(self, field: str, values: Mapping[str, str]) -> list[str]:
        """The ids, at most `PAGE`, whose record has the value given for it in a field; no other record may have it."""
        # Chroma takes six times as long if it is given the ids, too.
        where = {field: {"$in": list(values.values())}}
        return [id for (id,) in self._get(values, where=where)]

    def rows(self, ids: Sequence[str]) -> dict[str, Row]:
        """The metadata of those of the ids, at most `PAGE`, that have a record."""
        return {id: dict(row or {}) for id, row in self._get(ids, "metadatas")}

    def texts(self, ids: Sequence[str]) -> dict[str, tuple[str | None, Row]]:
        """Document and metadata of those of the ids, at most `PAGE`, that have a record."""
        return {id: (text, dict(row or {})) for id, text, row in self._get(ids, "documents", "metadatas")}

    def rows_with(self, field: str, values: Sequence[str]) -> dict[str, Row]:
        """The metadata, by id, of records that have one of the values, at most `PAGE`, in a field."""
        found = {id: dict(row or {}) for id, row in self._get(None, "metadatas", where={field: {"$in": list(values)}})}
        if any(row.get(field) not in values for row in found.values()):
            raise self._odd("records that were not asked for")
        return found

    def upsert(self, ids: Sequence[str], embeddings: Any, rows: Sequence[Row], texts: Any = None) -> None:
        """Write whole records; they are durable when this returns."""
        self._tell("upsert", ids=list(ids), embeddings=embeddings, metadatas=list(rows), documents=texts)

    def update(self, rows: Mapping[str, Row]) -> None:
        """Write some fields of existing records; their other fields stay."""
        self._tell("update", ids=list(rows), metadatas=list(rows.values()))

    def delete(self, ids: Sequence[str]) -> None:
        """Delete existing records."""
        if ids:
            self._tell("delete", ids=list(ids))

    def query(self, vectors: Any, k: int, ids: Sequence[str] | None = None) -> list[list[Found]]:
        """For each vector, at most `k` records (id, document, metadata, distance), the nearest first.

        Args:
            vectors: the vectors.
            k: how many.
            ids: search only among these.
        """
        columns = ("ids", "documents", "metadatas", "distances")
        given = {} if ids is None else {"ids": list(ids)}
        answer = self._ask("query", query_embeddings=vectors, n_results=k, include=list(columns[1:]), **given)
        found: list[list[Found]] = []
        for parts in zip(*(self._column(answer, name, len(vectors), list) for name in columns), strict=True):
            hits = dict(zip(columns, parts, strict=True))
            checked = [self._column(hits, name, min(k, len(parts[0]))) for name in columns]
            found.append([(id, text or "", dict(row or {}), far) for id, text, row, far in zip(*checked, strict=True)])
        return found

    def some_vector(self) -> Any:
        """The vector of a record; None if none can be read."""
        for id in self.ids():
            with suppress(StoreError):  # of a record that the index has lost
                return self._column(self._ask("get", ids=[id], include=["embeddings"]), "embeddings", 1)[0]
        return None

    def unsearchable(self, ids: Sequence[str], vector: Any) -> list[str]:
        """Those of the ids, at most `PAGE`, whose records are stored but can be in no search result.

        A process that is killed while Chroma writes its index can leave such records.

        Args:
            ids: ids of records.
            vector: any vector of the collection's width, to search with.
        """
        try:
            answer = self._ask("query", query_embeddings=[vector], n_results=len(ids), ids=list(ids), include=[])
            [found] = self._column(answer, "ids", 1, list)
        except StoreError:  # Chroma raises for a record that its index has lost
            self._ask("query", query_embeddings=[vector], n_results=1, include=[])  # but not for this
            found = []
        if set(map(str, found)) >= set(ids):
            return []
        half = len(ids) // 2
        return [*self.unsearchable(ids[:half], vector), *self.unsearchable(ids[half:], vector)] if half else list(ids)

    def _ask(self, method: str, **arguments: Any) -> Any:
        ask = partial(getattr(self._collection, method), **arguments)
        with explained(self.where, self._folder):
            try:
                return ask()
            except httpx.RemoteProtocolError:  # the server has closed the connection that was kept from the last call
                return ask()

    def _tell(self, method: str, **arguments: Any) -> None:
        with explained(self.where, self._folder, writing=True):
            getattr(self._collection, method)(**arguments)

    def _get(self, asked: Collection[str] | None, *columns: str, where: Any = None) -> list[tuple[Any, ...]]:
        """Id and columns of the records asked for (None: all), or of those of them that `where` selects."""
        if asked is not None and not asked:
            return []
        wanted = None if where or asked is None else list(dict.fromkeys(asked))  # Chroma refuses ids given twice
        answer = self._ask("get", ids=wanted, where=where, include=list(columns))
        ids = self._column(answer, "ids")
        if len(set(ids)) < len(ids) or (asked is not None and not set(ids) <= set(asked)):
            raise self._odd("records that were not asked for")
        return list(zip(ids, *(self._column(answer, name, len(ids)) for name in columns), strict=True))

    def _column(self, answer: Any, name: str, length: int | None = None, kind: Any = None) -> Sequence[Any]:
        """So many values of an answer, each of the kind that the column has, or of the given one."""
        column: Any = answer.get(name) if isinstance(answer, Mapping) else None
        kind = kind or _KINDS[name]
        if (
            not hasattr(column, "__len__")
            or isinstance(column, str)
            or (length is not None and len(column) != length)
            or not all(isinstance(value, kind) for value in column)
        ):
            raise self._odd(f"{short_repr(column)} as {name}")
        return column  # type: ignore[no-any-return]

    def _odd(self, what: str) -> StoreError:
        return StoreError(
            f"{self.where} answered with {what}: check that the address is right and that a supported version of "
            "Chroma runs there"
        )


@contextmanager
def explained(where: str, folder: Path | None = None, *, writing: bool = False) -> Iterator[None]:
    """Turn whatever Chroma and its HTTP client raise into a StoreError with a remedy.

    Args:
        where: the address.
        folder: the folder of an embedded engine.
        writing: whether Chroma was told to write, so that its refusal is a StoreWriteError.
    """
    try:
        yield
    except (CtxCompressError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except httpx.TransportError as error:
        raise StoreError(
            f"{where} does not answer ({type(error).__name__}: {error}): check that it runs and can be reached, "
            "then try again"
        ) from error
    except NotFoundError as error:
        raise StoreError(
            f"a collection in {where} is gone ({error}): open the store again, and index again if it was deleted"
        ) from error
    except BaseException as error:  # a panic of Chroma's Rust part is no Exception
        said = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        if fault := folder and disk_fault(folder):
            raise StoreWriteError(
                f"cannot write to {where} ({fault}; {said}): make room, or make it writable"
            ) from error
        remedy = (
            "check Chroma's version, restore a backup, or index again into a new folder"
            if folder
            else "read the server's log"
        )
        kind = StoreWriteError if writing else StoreError
        raise kind(f"Chroma failed on {where} ({said}): try again; if it fails again, {remedy}") from error


def lacks_room(folder: Path) -> str | None:
    """That the folder's disk has too little room for a write; None if it has enough."""
    free = shutil.disk_usage(folder).free
    return f"its disk has {free:,} bytes left" if free < _ROOM else None


def disk_fault(folder: Path) -> str | None:
    """Why nothing can be written to the folder; None if it can."""
    try:
        if fault := lacks_room(folder):
            return fault
        if closed := [path.name for path in folder.iterdir() if not os.access(path, os.W_OK)]:
            return f"this user may not write to {closed[0]} in it"
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None
