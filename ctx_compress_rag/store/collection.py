"""A Chroma collection, with Chroma's answers checked and its errors turned into StoreErrors."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import chromadb
import httpx
from chromadb.api import ClientAPI
from chromadb.errors import NotFoundError

from ctx_compress_rag.errors import StoreError
from ctx_compress_rag.store.place import DEFAULT_TIMEOUT, READ_TIMEOUT, StorePlace, connect_store, raising_store_errors
from ctx_compress_rag.store.threads import shielded_from_interrupts
from ctx_compress_rag.text.tokenizing import batched

T = TypeVar("T")
Row = dict[str, Any]  # the metadata of a record

Found = tuple[str, str, Row, float]  # a search result: id, document, metadata, distance

PAGE = 250
"""Records in one call, because Chroma fails with tens of thousands of ids, and writes fastest with 100 to 250."""


def chroma_pages(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the values in order, `PAGE` at a time."""
    for start in range(0, len(values), PAGE):
        yield values[start : start + PAGE]


def chroma_batches(values: Mapping[str, T], size: Callable[[T], int], limit: int) -> Iterator[dict[str, T]]:
    """Yield the values in order, at most `PAGE` at a time, of a total size up to `limit` (or one larger value)."""
    sizes = {id: size(value) for id, value in values.items()}
    for ids in batched(values, lambda ids: len(ids) <= PAGE and sum(map(sizes.__getitem__, ids)) <= limit):
        yield {id: values[id] for id in ids}


class ChromaCollection:
    """The records of a Chroma collection, which the first write creates. Thread-safe.

    `configuration` and `metadata` (None: Chroma's own) are for a new collection. `SoftContextStore` has the errors.
    """

    def __init__(
        self,
        place: StorePlace,
        name: str,
        configuration: Any = None,
        metadata: Mapping[str, Any] | None = None,
        lock_timeout: float = DEFAULT_TIMEOUT,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        self.place, self.name = place, name
        self._new = {"configuration": configuration, "metadata": metadata}
        self._lock_timeout, self._read_timeout = lock_timeout, read_timeout
        self._pid: int | None = os.getpid()
        self._known: tuple[ClientAPI, chromadb.Collection] | None = None

    def check(self, metadata: Row) -> None:
        """Raise StoreError if the metadata are not those of this kind of collection. Subclasses implement the check."""

    @shielded_from_interrupts
    def metadata(self) -> Row:
        """Return the collection's metadata, empty before the first write."""
        with self._reading() as found:
            return {} if found is None else dict(found.metadata or {})

    @shielded_from_interrupts
    def interrupted(self) -> bool:
        """Whether a process was killed while it wrote to the folder, so that a search may miss records."""
        with self._reading():
            return self.place.interrupted()

    @shielded_from_interrupts
    def generation(self) -> bytes:
        """Return a value that changes with each write, b"" if it is unknown."""
        with self._reading():
            return self.place.generation()

    @shielded_from_interrupts
    def count(self) -> int:
        with self._reading() as found:
            return 0 if found is None else int(self._ask(found.count))

    @shielded_from_interrupts
    def collection_names(self) -> list[str]:
        with self.place.reading(self._read_timeout) as client:
            return [] if client is None else sorted(each.name for each in client.list_collections())

    def ids(self) -> list[str]:
        return [id for (id,) in self._get()]

    def existing(self, ids: Sequence[str]) -> list[str]:
        return [id for (id,) in self._get_paged(ids)]

    def rows(self, ids: Sequence[str]) -> dict[str, Row]:
        """Return the metadata of those ids that have a record, by id."""
        return dict(self._get_paged(ids, "metadatas"))

    def texts(self, ids: Sequence[str]) -> dict[str, tuple[str | None, Row]]:
        """Return the document and the metadata of those ids that have a record, by id."""
        return {id: (text, row) for id, text, row in self._get_paged(ids, "documents", "metadatas")}

    def matching(self, field: str, values: Mapping[str, str]) -> set[str]:
        """Return those ids of `values` (id to value) whose record has the value in `field`. No other record may."""
        matching: set[str] = set()
        for ids in chroma_pages(list(values)):
            # Chroma takes six times as long if it is given the ids, too.
            matching.update(id for (id,) in self._get(where={field: {"$in": [values[id] for id in ids]}}))
        if not matching <= values.keys():
            raise self._odd()
        return matching

    def rows_with(self, field: str, values: Sequence[str]) -> dict[str, Row]:
        """Return the metadata, by id, of all records that have one of `values` in `field`."""
        rows: dict[str, Row] = {}
        for part in chroma_pages(list(dict.fromkeys(values))):
            rows |= dict(self._get("metadatas", where={field: {"$in": list(part)}}))
        if any(row.get(field) not in values for row in rows.values()):
            raise self._odd()
        return rows

    @shielded_from_interrupts
    def query(self, vectors: Any, k: int) -> list[list[Found]]:
        """Return, for each of vectors (n, dim), at most `k` records as `Found`, the nearest first."""
        columns = ["documents", "metadatas", "distances"]
        with self._reading() as records:
            if records is None:
                return [[] for _ in vectors]
            answer = self._ask(records.query, query_embeddings=vectors, n_results=k, include=columns)
            each = zip(*(answer[name] for name in ("ids", *columns)), strict=True)
            return [
                [(id, text or "", dict(row or {}), far) for id, text, row, far in zip(*hits, strict=True)]
                for hits in each
            ]

    @shielded_from_interrupts
    def unsearchable(self) -> list[str]:
        """Return the ids of stored records that no search finds, because a process was killed while it wrote them."""
        ids = self.ids()
        with self._reading() as found:
            if found is None:
                return []
            for id in ids:
                # The error is of a record that the index has lost.
                with suppress(StoreError), raising_store_errors(self.place.where):
                    [vector] = self._ask(found.get, ids=[id], include=["embeddings"])["embeddings"]
                    return [lost for part in chroma_pages(ids) for lost in self._unsearchable(found, part, vector)]
        return ids

    @shielded_from_interrupts
    def upsert(self, ids: Sequence[str], embeddings: Any, rows: Sequence[Row], texts: Any = None) -> None:
        """Write whole records, new or in place of those with these ids, at most `PAGE`; durable when this returns."""
        with self._writing() as collection:
            collection.upsert(ids=list(ids), embeddings=embeddings, metadatas=list(rows), documents=texts)

    @shielded_from_interrupts
    def delete(self, ids: Sequence[str]) -> None:
        for part in chroma_pages(ids):
            with self._writing() as collection:
                collection.delete(ids=list(part))

    @shielded_from_interrupts
    def check_writable(self) -> None:
        """Raise StoreError if a write would be refused now; a missing folder is created."""
        self._check_open()
        self.place.check_writable(self._lock_timeout)

    def close(self) -> None:
        forked, self._pid = self._pid != os.getpid(), None
        if not forked:
            self.place.close()

    @contextmanager
    def _reading(self) -> Iterator[chromadb.Collection | None]:
        self._check_open()
        with self.place.reading(self._read_timeout) as client:
            yield None if client is None else self._found(client)

    @contextmanager
    def _writing(self) -> Iterator[chromadb.Collection]:
        self._check_open()
        with self.place.writing(self._lock_timeout) as client:
            found = self._found(client)
            if found is None:
                # Another client may have created it meanwhile: then its metadata stay, and are checked.
                client.get_or_create_collection(self.name, embedding_function=None, **self._new)
                found = self._found(client)
            assert found is not None
            yield found

    def _found(self, client: ClientAPI) -> chromadb.Collection | None:
        if self._known is not None and self._known[0] is client:
            return self._known[1]
        try:
            found = client.get_collection(self.name, embedding_function=None)
        except (NotFoundError, UnicodeEncodeError):  # the latter for a name that is not UTF-8
            return None
        self.check(dict(found.metadata or {}))
        self._known = client, found
        return found

    def _check_open(self) -> None:
        if self._pid is None:
            raise StoreError(f"the store in {self.place.where} was closed: open it again")
        if self._pid != os.getpid():
            raise StoreError(
                f"the store in {self.place.where} was opened before a fork, and Chroma would hang in the child: "
                "start processes with 'spawn' and open the store in each"
            )

    def _get_paged(self, ids: Sequence[str], *columns: str) -> Iterator[tuple[Any, ...]]:
        for part in chroma_pages(list(dict.fromkeys(ids))):  # Chroma refuses ids given twice
            yield from self._get(*columns, ids=list(part))

    @shielded_from_interrupts
    def _get(self, *columns: str, ids: list[str] | None = None, where: Any = None) -> list[tuple[Any, ...]]:
        """Return the id and the columns of the records with `ids`, of those that `where` selects, or of all."""
        with self._reading() as records:
            if records is None:
                return []
            answer = self._ask(records.get, ids=ids, where=where, include=list(columns))
            rows = [tuple(row) for row in zip(*(answer[name] for name in ("ids", *columns)), strict=True)]
            found = {row[0] for row in rows if isinstance(row[0], str)}
            if len(found) < len(rows) or (ids is not None and not found <= set(ids)):
                raise self._odd()
            if columns[-1:] == ("metadatas",):
                rows = [(*row, dict(metadata or {})) for *row, metadata in rows]
        return rows

    def _unsearchable(self, found: chromadb.Collection, ids: Sequence[str], vector: Any) -> list[str]:
        given = {"query_embeddings": [vector], "include": []}
        try:
            with raising_store_errors(self.place.where):
                answer = self._ask(found.query, n_results=len(ids), ids=list(ids), **given)
                [searchable] = answer["ids"]
        except StoreError:  # Chroma raises for a record that its index has lost
            self._ask(found.query, n_results=1, **given)  # but not for this
            searchable = []
        if set(map(str, searchable)) >= set(ids):
            return []
        if len(ids) == 1:
            return list(ids)
        halves = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        return [lost for part in halves for lost in self._unsearchable(found, part, vector)]

    def _ask(self, method: Callable[..., Any], **arguments: Any) -> Any:
        try:
            return method(**arguments)
        except httpx.RemoteProtocolError:  # the server has closed the connection that was kept from the last call
            return method(**arguments)

    def _odd(self) -> StoreError:
        return StoreError(f"{self.place.where} answered with records not asked for: check its address and version")


class AppCollection(ChromaCollection):
    """A collection of the app, read with the app's own client."""

    def __init__(self, collection: chromadb.Collection) -> None:
        super().__init__(connect_store(collection), collection.name)
        self._app = collection

    @contextmanager
    def _reading(self) -> Iterator[chromadb.Collection]:
        with raising_store_errors(self.place.where):
            yield self._app
