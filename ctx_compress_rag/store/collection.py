"""The companion collection, with workarounds for Chroma's limits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import httpx
from chromadb.errors import ChromaError, NotFoundError

from ctx_compress_rag.errors import FingerprintMismatchError, StoreError, StoreWriteError
from ctx_compress_rag.store.codec import DEFAULT_CODEC, check_codec, payload_bytes
from ctx_compress_rag.store.connect import Connection
from ctx_compress_rag.store.lock import DEFAULT_TIMEOUT
from ctx_compress_rag.store.pages import WRITE_RECORDS, pages
from ctx_compress_rag.store.passage import Compresses
from ctx_compress_rag.store.record import Record
from ctx_compress_rag.store.scope import own_id
from ctx_compress_rag.store.seven_bits import n_bytes
from ctx_compress_rag.store.sqlite import SqliteClient, SqliteCollection

Found = dict[str, dict[str, Any]]
"""Metadata of records by passage id."""

FORMAT = 2
_FORMATS = (1, FORMAT)  # records of format 1 have no seals: `reseal` adds them
_MANY = 1000  # with more ids, it is faster to read the whole column
_WRITE_BYTES = 8 << 20  # a server refuses bodies beyond 40 MiB
EMBEDDING: Any = [0.0]  # Chroma requires an embedding; one dimension costs least
# Nobody searches the dummy embeddings, so the graph is as small as Chroma allows. Synchronising every 100
# records (not 1000) makes the first read after reopening 18-48 ms instead of 250-830 ms.
_CONFIGURATION: Any = {
    "hnsw": {"sync_threshold": 100, "batch_size": 100, "max_neighbors": 2, "ef_construction": 2, "ef_search": 2}
}


class Sizes(NamedTuple):
    """Sums over all records; `payload` in bytes, before encoding as text."""

    records: int
    slots: int
    tokens: int
    payload: int


P = ParamSpec("P")
R = TypeVar("R")


def _answered(method: Callable[Concatenate[Companion, P], R]) -> Callable[Concatenate[Companion, P], R]:
    @wraps(method)
    def call(self: Companion, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with explained(self.connection.where):
            return method(self, *args, **kwargs)

    return call


class Companion:
    """The records of one bundle's soft contexts.

    Created in Chroma at the first write: reading alone creates nothing.

    Args:
        connection: where it is.
        bundle: the bundle whose soft contexts it holds.
        codec: the codec for a new collection, None for the default; an existing one keeps its own.
        ratio: source tokens per slot in a new collection, None for the bundle's base ratio; an existing one
            keeps its own.
        timeout: seconds that a write waits for other processes' writes; a read waits as long, but at least the default.

    Raises:
        FingerprintMismatchError, StoreError: see SoftContextStore.
    """

    def __init__(
        self, connection: Connection, bundle: Compresses, codec: str | None, ratio: int | None, timeout: float
    ) -> None:
        self.connection = connection
        self._bundle = bundle
        self._codec_asked = None if codec is None else check_codec(codec)
        self._ratio_asked = ratio
        self._timeout = timeout
        self._read_timeout = max(timeout, DEFAULT_TIMEOUT)
        self._pid: int | None = os.getpid()
        self._found: tuple[Any, Any] | None = None  # a client and its collection
        self._about: dict[str, Any] = {}
        try:
            self.count()
            if not self._about and connection.folder is not None and not connection.folder.writable:
                raise StoreWriteError(
                    f"{connection.where} has no collection {connection.companion!r}, and this user may not make one "
                    "there: correct the collection's name, or change the folder's permissions"
                )
        except BaseException:
            connection.close()
            raise

    @property
    def codec(self) -> str:
        """Name of the codec that payloads are written with."""
        return str(self._about.get("codec") or self._codec_asked or DEFAULT_CODEC)

    @property
    def ratio(self) -> int:
        """Source tokens per slot."""
        return int(self._about.get("base_ratio") or self._ratio_asked or self._bundle.config.base_ratio)

    @property
    def fingerprint(self) -> str:
        """The bundle's fingerprint in the form used when the store was made."""
        return str(self._about.get("fingerprint") or self._bundle.fingerprint)

    @_answered
    def ids(self) -> list[str]:
        """All ids."""
        with self._looking() as collection:
            return list(collection.get(include=[])["ids"]) if collection else []

    @_answered
    def count(self) -> int:
        """How many records there are."""
        with self._reading() as collection:
            return int(collection.count()) if collection else 0

    @_answered
    def sizes(self) -> Sizes:
        """Sums over all records."""
        with self._looking() as collection:
            if collection is None:
                return Sizes(0, 0, 0, 0)
            if isinstance(collection, SqliteCollection):
                slots, tokens = collection.sums(["slots", "tokens"])
                payloads = list(collection.column_tails("payload"))
                return Sizes(collection.count(), slots, tokens, sum(n_bytes(*each) for each in payloads))
            total = Sizes(0, 0, 0, 0)
            for ids in pages(collection.get(include=[])["ids"]):
                for row in collection.get(ids=ids, include=["metadatas"])["metadatas"]:
                    size = payload_bytes(row["payload"])
                    total = Sizes(
                        total.records + 1,
                        total.slots + row["slots"],
                        total.tokens + row["tokens"],
                        total.payload + size,
                    )
            return total

    def read(self, ids: Sequence[str]) -> Found:
        """The records that exist, by id."""
        return self._select(ids, ["metadatas"])

    def existing(self, ids: Sequence[str]) -> list[str]:
        """The ids that have a record, each once."""
        return list(self._select(ids, []))

    @_answered
    def matching(self, field: str, values: dict[str, str]) -> set[str]:
        """The ids whose record has the value given for the id in `field`; reads no payload."""
        with self._looking() as collection:
            if isinstance(collection, SqliteCollection):
                held = collection.column(field, None if len(values) > _MANY else list(values))
                return {id for id, value in values.items() if held.get(id) == value}
        matching: set[str] = set()
        for ids in pages(list(values)):
            matching.update(self._select(ids, [], {field: {"$in": [values[id] for id in ids]}}))
        return matching

    @_answered
    def read_by(self, field: str, values: Sequence[str]) -> Found:
        """The records that have one of the values in `field`, by id."""
        found = Found()
        with self._reading() as collection:
            for part in pages(list(dict.fromkeys(values))) if collection else ():
                found.update(_by_id(collection.get(where={field: {"$in": part}}, include=["metadatas"])))
        return found

    @_answered
    def upsert(self, rows: dict[str, Record]) -> None:
        """Write whole records; they are durable when this returns."""
        for part in _parts(rows):
            self._send(part)

    @_answered
    def update(self, rows: dict[str, Record]) -> None:
        """Write some fields of existing records; their other fields stay."""
        for part in _parts(rows):
            with self._writing() as collection:
                collection.update(ids=list(part), metadatas=list(part.values()))

    @_answered
    def delete(self, ids: Sequence[str]) -> None:
        """Delete existing records."""
        for part in pages(list(ids), WRITE_RECORDS):
            with self._writing() as collection:
                collection.delete(ids=part)

    @_answered
    def check_writable(self) -> None:
        """Raise StoreWriteError if the next write would be refused; create the collection if there is none."""
        with self._writing():
            pass

    def close(self) -> None:
        """Release the engine; closing again has no effect."""
        if self._pid is None:
            return
        forked = self._pid != os.getpid()
        self._pid = None
        if not forked:
            self.connection.close()

    def _send(self, rows: dict[str, Record]) -> None:
        try:
            with self._writing() as collection:
                collection.upsert(ids=list(rows), embeddings=[EMBEDDING] * len(rows), metadatas=list(rows.values()))
        except Exception as error:  # Chroma's HTTP client raises a plain Exception for errors of no known type
            if isinstance(error, StoreError) or not _too_large(error, sum(map(_size, rows.values()))):
                raise
            if len(rows) > 1:
                items = list(rows.items())
                self._send(dict(items[: len(items) // 2]))
                self._send(dict(items[len(items) // 2 :]))
                return
            [(key, row)] = rows.items()
            raise StoreError(
                f"passage {own_id(key)!r} takes {_size(row):,} bytes as a record, more than {self.connection.where} "
                "accepts in one request: cut it into smaller passages, choose codec='int8' or a coarser ratio for the "
                "store, or raise the server's limit (max_payload_size_bytes)"
            ) from error

    def _check_open(self) -> None:
        if self._pid is None:
            raise StoreError(f"the store in {self.connection.where} was closed: open it again")
        if self._pid != os.getpid():
            raise StoreError(
                f"the store in {self.connection.where} was opened before a fork, and Chroma would hang in the child: "
                "start processes with 'spawn' and open the store in each"
            )

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """The collection; None before the first write."""
        self._check_open()
        with self.connection.reading(self._read_timeout) as client:
            yield self._of(client)

    @contextmanager
    def _looking(self) -> Iterator[Any]:
        self._check_open()
        with self.connection.looking(self._read_timeout) as client:
            yield self._of(client)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        self._check_open()
        with self.connection.writing(self._timeout) as client:
            yield self._of(client) or self._made(client)

    def _of(self, client: Any) -> Any:
        """The client's collection; None if there is none yet."""
        if client is None:
            return None
        found = self._found
        if found is not None and found[0] is client:
            return found[1]
        try:
            collection = client.get_collection(self.connection.companion, embedding_function=None)
        except NotFoundError:
            return None
        return self._kept(client, collection)

    def _made(self, client: Any) -> Any:
        metadata = {
            "ctx_format": FORMAT,
            "bundle": self._bundle.config.name,
            "fingerprint": self._bundle.fingerprint,
            "base_ratio": self.ratio,
            "codec": self.codec,
        }
        made = client.create_collection(
            self.connection.companion,
            configuration=_CONFIGURATION,
            metadata=metadata,
            embedding_function=None,
            get_or_create=True,  # another client may have created it first: then its metadata stay, and are checked
        )
        return self._kept(client, made)

    def _kept(self, client: Any, collection: Any) -> Any:
        self._about = dict(self._checked(collection).metadata or {})
        if not isinstance(client, SqliteClient):
            self._found = (client, collection)
        return collection

    def _checked(self, collection: Any) -> Any:
        metadata, where, bundle = collection.metadata or {}, self.connection.where, self._bundle
        if metadata.get("ctx_format") not in _FORMATS:
            raise StoreError(
                f"the collection {collection.name!r} in {where} is not a store of format {FORMAT} "
                f"(its format is {metadata.get('ctx_format')!r}): choose another collection name"
            )
        if bundle.fingerprint != metadata["fingerprint"]:
            raise FingerprintMismatchError(
                f"the soft contexts in {collection.name!r} ({where}) were made by bundle {metadata['bundle']!r}, "
                f"fingerprint {metadata['fingerprint'][:12]}, and {bundle.config.name!r}, fingerprint "
                f"{bundle.fingerprint[:12]}, cannot read them: take that bundle, or index again: into another "
                f"folder or collection, or first delete this one: client.delete_collection({collection.name!r})"
            )
        if self._codec_asked not in (None, metadata["codec"]):
            raise StoreError(
                f"the store in {where} has codec {metadata['codec']!r}, not {self._codec_asked!r}: leave codec out, or "
                "index again under another collection name"
            )
        if type(metadata["base_ratio"]) is not int or metadata["base_ratio"] < 1:
            raise StoreError(
                f"the store in {where} was made with the impossible ratio {metadata['base_ratio']!r}: index again "
                f"under another collection name, or after client.delete_collection({collection.name!r})"
            )
        if self._ratio_asked not in (None, metadata["base_ratio"]):
            raise StoreError(
                f"the store in {where} has ratio {metadata['base_ratio']}, not {self._ratio_asked}: leave ratio out, "
                "or index again under another collection name"
            )
        return collection

    @_answered
    def _select(self, ids: Sequence[str], include: list[Any], where: Any = None) -> Found:
        """The records of ids. Chroma refuses duplicate ids and empty or very long lists, and changes the order."""
        found = Found()
        with self._reading() as collection:
            for part in pages(list(dict.fromkeys(ids))) if collection else ():
                found.update(_by_id(collection.get(ids=part, where=where, include=include)))
        return found


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn whatever Chroma and its HTTP client raise into a StoreError with a remedy."""
    try:
        yield
    except httpx.TransportError as error:
        raise StoreError(
            f"{where} does not answer ({type(error).__name__}: {error}): check that it runs and can be reached, "
            "then try again"
        ) from error
    except NotFoundError as error:
        raise StoreError(
            f"a collection in {where} is gone ({error}): open the store again, and index again if it was deleted"
        ) from error
    except (ChromaError, httpx.HTTPError, json.JSONDecodeError) as error:
        raise _explained(error, where) from error
    except BaseException as error:
        if type(error) is Exception:
            raise _explained(error, where) from error
        if type(error).__name__ != "PanicException":  # pyo3's, not a subclass of Exception
            raise
        raise StoreError(f"Chroma crashed on {where} ({error}): run `ctx-compress repair --store {where}`") from error


def column(collection: Any, field: str) -> dict[str, Any]:
    """One metadata field of all records that have it, by id; empty if there is no collection."""
    if isinstance(collection, SqliteCollection):
        return collection.column(field)
    found: dict[str, Any] = {}
    for ids in pages(collection.get(include=[])["ids"]) if collection else ():
        rows = _by_id(collection.get(ids=ids, include=["metadatas"]))
        found |= {id: row[field] for id, row in rows.items() if field in row}
    return found


def _by_id(result: Any) -> Found:
    metadatas = result["metadatas"]
    if metadatas is None:
        return {id: {} for id in result["ids"]}
    return {id: dict(metadata or {}) for id, metadata in zip(result["ids"], metadatas, strict=True)}


def _parts(rows: dict[str, Record]) -> Iterator[dict[str, Record]]:
    """Rows in parts that fit into one request."""
    part: dict[str, Record] = {}
    size = 0
    for id, row in rows.items():
        if part and (len(part) == WRITE_RECORDS or size + _size(row) > _WRITE_BYTES):
            yield part
            part, size = {}, 0
        part[id] = row
        size += _size(row)
    if part:
        yield part


def _size(row: Record) -> int:
    return sum(len(str(value)) for value in row.values())


def _too_large(error: Exception, size: int) -> bool:
    """Whether a server refused a request for its size in bytes."""
    if isinstance(error, httpx.RemoteProtocolError | httpx.WriteError):
        # The server may close the connection before it has read the body; its answer is then lost.
        return size > _WRITE_BYTES
    said = f"{error} {getattr(getattr(error, 'response', None), 'status_code', '')}".lower()
    return any(words in said for words in ("413", "too large", "length limit"))


def _explained(error: Exception, where: str) -> StoreError:
    said = str(error).partition("\n")[0] or type(error).__name__
    if any(words in said for words in ("readonly", "read-only", "disk is full", "No space left", "disk I/O")):
        return StoreWriteError(f"cannot write to {where} ({said}): check that it is writable and the disk has room")
    return StoreError(
        f"Chroma failed on {where} ({said}): try again; if it fails again, run `ctx-compress repair` (a folder) or "
        "read the server's log"
    )
