"""The companion collection itself: Chroma's limits and traps end here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import chromadb
import httpx
from chromadb.errors import NotFoundError

from ctx_compress_rag.errors import ConfigError, FingerprintMismatchError, StoreError
from ctx_compress_rag.stores.codecs import DEFAULT_CODEC, check_codec
from ctx_compress_rag.stores.connect import Connection
from ctx_compress_rag.stores.lock import WriterLock
from ctx_compress_rag.stores.passages import Compresses
from ctx_compress_rag.stores.records import Record

Found = dict[str, dict[str, Any]]
"""Metadata of records by passage id."""

FORMAT = 1
READ_IDS = 250  # Chroma fails with tens of thousands of ids in one query
WRITE_RECORDS = 250  # its ingestion is fastest with 100 to 250
_WRITE_BYTES = 8 << 20  # a server refuses bodies beyond 40 MiB
_EMBEDDING: Any = [0.0]  # Chroma wants an embedding; one dimension costs least
# Nobody searches the dummy embeddings, so the graph is as small as Chroma allows. Synchronising every 100
# records (not 1000) makes the first read after reopening 18-48 ms instead of 250-830 ms.
_CONFIGURATION: Any = {
    "hnsw": {"sync_threshold": 100, "batch_size": 100, "max_neighbors": 2, "ef_construction": 2, "ef_search": 2}
}


P = ParamSpec("P")
R = TypeVar("R")


def _answered(method: Callable[Concatenate[Companion, P], R]) -> Callable[Concatenate[Companion, P], R]:
    """A server that does not answer is a StoreError, whichever HTTP error Chroma's client lets through."""

    @wraps(method)
    def call(self: Companion, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except httpx.TransportError as error:
            raise StoreError(
                f"{self.connection.where} does not answer ({type(error).__name__}: {error}): see that it runs and "
                "can be reached, then ask again"
            ) from error

    return call


class Companion:
    """The records of one bundle's soft contexts.

    Made in Chroma at the first write, so that reading alone leaves nothing behind.

    Args:
        connection: where it is.
        bundle: the bundle whose soft contexts it holds.
        codec: the codec for a new collection, None for the default; an existing one keeps its own.
        ratio: source tokens per slot in a new collection, None for the bundle's base ratio; an existing one
            keeps its own.

    Raises:
        FingerprintMismatchError, StoreError: see SoftContextStore.
    """

    def __init__(self, connection: Connection, bundle: Compresses, codec: str | None, ratio: int | None) -> None:
        self.connection = connection
        self._bundle = bundle
        self._codec_asked = None if codec is None else check_codec(codec)
        self._ratio_asked = ratio
        self._lock = WriterLock(connection.folder) if connection.folder else None
        self._pid: int | None = os.getpid()
        self._collection: chromadb.Collection | None = None
        self._readable()

    @property
    def codec(self) -> str:
        """Name of the codec that payloads are written with."""
        if self._collection is not None:
            return str((self._collection.metadata or {})["codec"])
        return self._codec_asked or DEFAULT_CODEC

    @property
    def ratio(self) -> int:
        """Source tokens per slot."""
        if self._collection is not None:
            return int((self._collection.metadata or {})["base_ratio"])
        return self._ratio_asked or self._bundle.config.base_ratio

    @property
    def fingerprint(self) -> str:
        """The fingerprint in the form that the store was made with."""
        if self._collection is not None:
            return str((self._collection.metadata or {})["fingerprint"])
        return self._bundle.fingerprint

    @_answered
    def ids(self) -> list[str]:
        """All ids."""
        collection = self._readable()
        return collection.get(include=[])["ids"] if collection else []

    @_answered
    def count(self) -> int:
        """How many records there are."""
        collection = self._readable()
        return collection.count() if collection else 0

    def read(self, ids: Sequence[str]) -> Found:
        """The records that exist, by id."""
        return self._select(ids, ["metadatas"])

    def existing(self, ids: Sequence[str]) -> list[str]:
        """Those of the ids that have a record, each once."""
        return list(self._select(ids, []))

    def matching(self, field: str, values: dict[str, str]) -> set[str]:
        """Those of the ids whose record has one of the values in `field`; reads no payload."""
        matching: set[str] = set()
        ids = list(values)
        for start in range(0, len(ids), READ_IDS):
            batch = ids[start : start + READ_IDS]
            matching.update(self._select(batch, [], {field: {"$in": [values[id] for id in batch]}}))
        return matching

    @_answered
    def read_by(self, field: str, values: Sequence[str]) -> Found:
        """The records that have one of the values in `field`, which Chroma indexes, by id."""
        collection, found = self._readable(), Found()
        unique = list(dict.fromkeys(values))
        for start in range(0, len(unique) if collection else 0, READ_IDS):
            assert collection is not None
            where: Any = {field: {"$in": unique[start : start + READ_IDS]}}
            found.update(_by_id(collection.get(where=where, include=["metadatas"])))
        return found

    @_answered
    def upsert(self, rows: dict[str, Record]) -> None:
        """Write whole records; they are durable when this returns."""
        if not rows:
            return
        largest = max(sum(len(str(value)) for value in row.values()) for row in rows.values())
        for ids, metadatas in _batches(rows, max(1, min(WRITE_RECORDS, _WRITE_BYTES // largest))):
            self.writable().upsert(ids=ids, embeddings=[_EMBEDDING] * len(ids), metadatas=metadatas)

    @_answered
    def update(self, rows: dict[str, Record]) -> None:
        """Write some fields of records that exist; the others stay."""
        for ids, metadatas in _batches(rows, WRITE_RECORDS):
            self.writable().update(ids=ids, metadatas=metadatas)

    @_answered
    def delete(self, ids: Sequence[str]) -> None:
        """Delete records that exist."""
        for start in range(0, len(ids), WRITE_RECORDS):
            self.writable().delete(ids=list(ids[start : start + WRITE_RECORDS]))

    @_answered
    def writable(self) -> chromadb.Collection:
        """The collection, with the right to write to it; StoreLockedError if another process has it."""
        self._check_open()
        if self._lock:
            self._lock.take()
        if self._collection is None:
            made = self.connection.client.create_collection(
                self.connection.companion,
                configuration=_CONFIGURATION,
                metadata={
                    "ctx_format": FORMAT,
                    "bundle": self._bundle.config.name,
                    "fingerprint": self._bundle.fingerprint,
                    "base_ratio": self.ratio,
                    "codec": self.codec,
                },
                embedding_function=None,
                get_or_create=True,  # another client may have been first: its metadata then stand, and are checked
            )
            self._collection = self._checked(made)
        return self._collection

    def close(self) -> None:
        """Give the writer's lock and an own client back; without effect the second time."""
        if self._pid is None:
            return
        self._pid = None
        if self._lock:
            self._lock.release()
        self.connection.close()

    def _check_open(self) -> None:
        if self._pid is None:
            raise StoreError(f"the store in {self.connection.where} was closed: open it anew")
        if self._pid != os.getpid():
            raise StoreError(
                f"the store in {self.connection.where} was opened before a fork, and Chroma would hang in the child: "
                "start processes with 'spawn' and open the store in each"
            )

    @_answered
    def _readable(self) -> chromadb.Collection | None:
        """The collection; None as long as nobody has written."""
        self._check_open()
        if self._collection is None:
            try:
                found = self.connection.client.get_collection(self.connection.companion, embedding_function=None)
            except NotFoundError:
                return None
            self._collection = self._checked(found)
        return self._collection

    def _checked(self, collection: chromadb.Collection) -> chromadb.Collection:
        metadata, where, bundle = collection.metadata or {}, self.connection.where, self._bundle
        if metadata.get("ctx_format") != FORMAT:
            raise StoreError(
                f"the collection {collection.name!r} in {where} is no store of format {FORMAT} "
                f"(it says {metadata.get('ctx_format')!r}): choose another collection name"
            )
        if not bundle.made(metadata["fingerprint"]):
            raise FingerprintMismatchError(
                f"the soft contexts in {collection.name!r} ({where}) were made by bundle {metadata['bundle']!r}, "
                f"fingerprint {metadata['fingerprint'][:12]}, and {bundle.config.name!r}, fingerprint "
                f"{bundle.fingerprint[:12]}, cannot read them: open the store with that bundle, or index again under "
                f"another collection name, or after client.delete_collection({collection.name!r})"
            )
        if self._codec_asked not in (None, metadata["codec"]):
            raise StoreError(
                f"the store in {where} has codec {metadata['codec']!r}, not {self._codec_asked!r}: leave codec out, or "
                "index again under another collection name"
            )
        if self._ratio_asked not in (None, metadata["base_ratio"]):
            raise StoreError(
                f"the store in {where} has ratio {metadata['base_ratio']}, not {self._ratio_asked}: leave it out, or "
                "index again under another collection name"
            )
        return collection

    @_answered
    def _select(self, ids: Sequence[str], include: list[Any], where: Any = None) -> Found:
        """Records of ids. Chroma refuses duplicates, empty lists and very long ones, and keeps no order."""
        if isinstance(ids, str):
            raise ConfigError(f"ids must be a list, got the str {ids!r}")
        collection, found = self._readable(), Found()
        unique = list(dict.fromkeys(ids))
        for start in range(0, len(unique) if collection else 0, READ_IDS):
            assert collection is not None
            found.update(_by_id(collection.get(ids=unique[start : start + READ_IDS], where=where, include=include)))
        return found


def _by_id(result: chromadb.GetResult) -> Found:
    metadatas = result["metadatas"]
    if metadatas is None:
        return {id: {} for id in result["ids"]}
    return {id: dict(metadata or {}) for id, metadata in zip(result["ids"], metadatas, strict=True)}


def _batches(rows: dict[str, Record], size: int) -> list[tuple[list[str], Any]]:
    items = list(rows.items())
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    return [([id for id, _ in part], [row for _, row in part]) for part in parts]
