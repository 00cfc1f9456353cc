"""Chroma's client behind one boundary: whatever it raises or answers becomes what was asked for, or a StoreError."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
_ROOM = 32 << 20
"""Bytes that must be free before a write: twice what Chroma was measured to need for the largest of this library."""
_PROBE_BYTES = 1 << 20


def pages(values: Sequence[T], size: int = PAGE) -> Iterator[Sequence[T]]:
    """The values in order, `size` at a time."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


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
                return self.records(self._client.get_collection(name, embedding_function=None))
            except (NotFoundError, UnicodeEncodeError):  # the latter for a name that is not UTF-8
                return None

    def create(self, name: str, configuration: Any, metadata: Mapping[str, Any]) -> Records:
        """A new collection, or the one of this name that another client has made meanwhile."""
        with explained(self.where, self._folder, writing=True):
            return self.records(
                self._client.create_collection(
                    name,
                    configuration=configuration,
                    metadata=dict(metadata),
                    embedding_function=None,
                    get_or_create=True,
                )
            )

    def records(self, collection: Any) -> Records:
        """The records of a collection of this client."""
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
            self.metadata: Row = self._row(collection.metadata)

    def count(self) -> int:
        """How many records there are."""
        count = self._ask("count")
        if type(count) is not int or count < 0:
            raise self._odd(f"{short_repr(count)} as a count")
        return count

    def ids(self) -> list[str]:
        """The ids of all records."""
        return self._ids(self._ask("get", include=[]), None)

    def existing(self, ids: Sequence[str]) -> list[str]:
        """Those of the ids, at most `PAGE`, that have a record."""
        return self._ids(self._ask("get", ids=_unique(ids), include=[]), ids) if ids else []

    def matching(self, field: str, values: Mapping[str, str]) -> list[str]:
        """The ids, at most `PAGE`, whose record has the value given for it in a field; no other record may have it."""
        # Chroma takes six times as long if it is given the ids, too.
        where = {field: {"$in": list(values.values())}}
        return self._ids(self._ask("get", where=where, include=[]), values) if values else []

    def rows(self, ids: Sequence[str]) -> dict[str, Row]:
        """The metadata of those of the ids, at most `PAGE`, that have a record."""
        if not ids:
            return {}
        answer = self._ask("get", ids=_unique(ids), include=["metadatas"])
        return dict(zip(self._ids(answer, ids), self._rows(answer), strict=True))

    def texts(self, ids: Sequence[str]) -> dict[str, tuple[str | None, Row]]:
        """Document and metadata of those of the ids, at most `PAGE`, that have a record."""
        if not ids:
            return {}
        answer = self._ask("get", ids=_unique(ids), include=["documents", "metadatas"])
        found, documents = self._ids(answer, ids), self._column(answer, "documents", len(answer["ids"]))
        if not all(each is None or isinstance(each, str) for each in documents):
            raise self._odd("documents that are no texts")
        return dict(zip(found, zip(documents, self._rows(answer), strict=True), strict=True))

    def rows_with(self, field: str, values: Sequence[str]) -> dict[str, Row]:
        """The metadata, by id, of records that have one of the values, at most `PAGE`, in a field."""
        answer = self._ask("get", where={field: {"$in": list(values)}}, include=["metadatas"])
        found = dict(zip(self._ids(answer, None), self._rows(answer), strict=True))
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
        include = ["documents", "metadatas", "distances"]
        given = {} if ids is None else {"ids": list(ids)}
        answer = self._ask("query", query_embeddings=vectors, n_results=k, include=include, **given)
        columns = [self._column(answer, name, len(vectors)) for name in ("ids", *include)]
        found = []
        for parts in zip(*columns, strict=True):
            if any(not isinstance(part, list) or len(part) != len(parts[0]) or len(part) > k for part in parts):
                raise self._odd("search results of different lengths")
            hits = [(id, text, self._row(row), distance) for id, text, row, distance in zip(*parts, strict=True)]
            for id, text, _, distance in hits:
                if not (isinstance(id, str) and isinstance(text, str | None) and isinstance(distance, float)):
                    raise self._odd(f"the search result {short_repr((id, text, distance))}")
            found.append([(id, text or "", row, distance) for id, text, row, distance in hits])
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
            [found] = self._column(answer, "ids", 1)
        except StoreError:  # Chroma raises for a record that its index has lost
            self._ask("query", query_embeddings=[vector], n_results=1, include=[])  # but not for this
            found = []
        if set(found) >= set(ids):
            return []
        half = len(ids) // 2
        return [*self.unsearchable(ids[:half], vector), *self.unsearchable(ids[half:], vector)] if half else list(ids)

    def _ask(self, method: str, **arguments: Any) -> Any:
        with explained(self.where, self._folder):
            return getattr(self._collection, method)(**arguments)

    def _tell(self, method: str, **arguments: Any) -> None:
        with explained(self.where, self._folder, writing=True):
            getattr(self._collection, method)(**arguments)

    def _ids(self, answer: Any, asked: Iterable[str] | None) -> list[str]:
        ids = answer.get("ids") if isinstance(answer, Mapping) else None
        if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
            raise self._odd(f"{short_repr(answer)} in place of records")
        if len(set(ids)) < len(ids) or (asked is not None and not set(ids) <= set(asked)):
            raise self._odd("records that were not asked for")
        return ids

    def _rows(self, answer: Any) -> list[Row]:
        return [self._row(row) for row in self._column(answer, "metadatas", len(answer["ids"]))]

    def _row(self, row: Any) -> Row:
        if row is not None and not isinstance(row, Mapping):
            raise self._odd(f"{short_repr(row)} as metadata")
        return dict(row or {})

    def _column(self, answer: Any, name: str, length: int) -> Sequence[Any]:
        column = answer.get(name) if isinstance(answer, Mapping) else None
        if column is None or not hasattr(column, "__len__") or isinstance(column, str) or len(column) != length:
            raise self._odd(f"{short_repr(column)} as {length} {name}")
        return column  # type: ignore[no-any-return]  # a list, or an array of embeddings

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
        remedy = "restore a backup, or index again into a new folder" if folder else "read the server's log"
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


def _unique(ids: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(ids))  # Chroma refuses ids given twice
