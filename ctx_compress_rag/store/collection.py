"""The collection that holds a store's records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from ctx_compress_rag.errors import FingerprintMismatchError, MissingPassageError, PayloadError, StoreError, short_repr
from ctx_compress_rag.store.chroma import Chroma, Records, Row, batches, pages
from ctx_compress_rag.store.codec import DEFAULT_CODEC, check_codec, payload_bytes
from ctx_compress_rag.store.connect import Connection
from ctx_compress_rag.store.key import Signer
from ctx_compress_rag.store.marker import Marker, MarkerCodec
from ctx_compress_rag.store.passage import Compresses, Passage, StoreInfo, to_passages
from ctx_compress_rag.store.record import Labels, Record, text_hash
from ctx_compress_rag.store.scope import passage_id, readable, record_id, scoped_marker_id

T = TypeVar("T")

FORMAT = 3
_WRITE_BYTES = 8 << 20  # a server refuses bodies beyond 40 MiB
_REMEMBERED = 100_000  # marker ids with record ids of 100 characters: 30 MB
_EMBEDDING = [0.0]  # Chroma requires an embedding; one dimension costs least
# Nobody searches the dummy embeddings, so the graph is as small as Chroma allows. Synchronizing every 100
# records (not 1000) makes the first read after reopening 18-48 ms instead of 250-830 ms.
_CONFIGURATION: Any = {
    "hnsw": {"sync_threshold": 100, "batch_size": 100, "max_neighbors": 2, "ef_construction": 2, "ef_search": 2}
}


class SoftContextCollection:
    """The records of one bundle's soft contexts. Thread-safe.

    Created in Chroma at the first write: reading alone creates nothing.

    Args:
        connection: where it is.
        bundle: the bundle whose soft contexts it holds.
        key: what records and markers are signed with.
        codec: the codec for a new collection, None for the default; an existing one keeps its own.
        ratio: source tokens per slot in a new collection, None for the bundle's base ratio; an existing one
            keeps its own.
        timeout: seconds that a write waits for other processes' writes.
        read_timeout: seconds that a read waits for a write in progress, and as many for Chroma's answer.

    Raises:
        FingerprintMismatchError, StoreError: see SoftContextStore.
    """

    def __init__(
        self,
        connection: Connection,
        bundle: Compresses,
        key: Signer,
        codec: str | None,
        ratio: int | None,
        timeout: float,
        read_timeout: float,
    ) -> None:
        self.connection = connection
        self._bundle = bundle
        self.key = key
        self._codec_asked = None if codec is None else check_codec(codec)
        self._ratio_asked = ratio
        self._timeout, self._read_timeout = timeout, read_timeout
        self._pid: int | None = os.getpid()
        self._found: tuple[Chroma, Records] | None = None
        self._about: Row = {}
        # Lookups by marker: with 50,000 records, one by field takes 12 ms, by ids 0.5 ms. Most markers are read by the
        # process that wrote them.
        self._ids_by_marker: dict[str, str] = {}
        try:
            self.count()
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
    def signer(self) -> MarkerCodec:
        """What signs markers and records."""
        return self.key.codec(self._bundle.fingerprint)

    def ids(self) -> list[str]:
        """All ids."""
        return self._read(Records.ids, [])

    def count(self) -> int:
        """How many records there are."""
        return self._read(Records.count, 0)

    def info(self) -> StoreInfo:
        """What there is; damaged records do not count."""
        records = slots = tokens = payload_size = 0
        for ids in pages(self.ids()):
            for row in self.rows(ids).values():
                each, stand_for, payload = row.get("slots"), row.get("tokens"), row.get("payload")
                if isinstance(each, int) and isinstance(stand_for, int) and isinstance(payload, str):
                    records, slots, tokens = records + 1, slots + each, tokens + stand_for
                    payload_size += payload_bytes(payload)
        return StoreInfo(
            location=self.connection.where,
            collection=self.connection.collection,
            bundle=self._bundle.config.name,
            fingerprint=self._bundle.fingerprint,
            codec=self.codec,
            base_ratio=self.ratio,
            passages=records,
            slots=slots,
            source_tokens=tokens,
            payload_bytes=payload_size,
            disk_bytes=self.connection.disk_bytes(),
        )

    def rows(self, ids: Sequence[str]) -> dict[str, Row]:
        """The fields of the records that exist, by id."""
        found: dict[str, Row] = {}
        for part in pages(list(dict.fromkeys(ids))):
            found |= self._read(partial(Records.rows, ids=part), found)
        return found

    def existing(self, ids: Sequence[str]) -> list[str]:
        """The ids that have a record, each once."""
        found: list[str] = []
        for part in pages(list(dict.fromkeys(ids))):
            found += self._read(partial(Records.existing, ids=part), [])
        return found

    def matching(
        self, field: str, digest: Callable[[str, str, Passage], str], passages: Mapping[str, Passage]
    ) -> set[str]:
        """Record ids whose stored hash equals the passage's; reads no payload.

        The hash covers the id, so no other record can match.
        """
        found: set[str] = set()
        for part in pages(list(passages)):
            hashes = {key: digest(self._bundle.fingerprint, key, passages[key]) for key in part}
            found.update(self._read(partial(Records.matching, field=field, values=hashes), []))
        return found

    def holding(self, passages: Mapping[str, Passage], scope: str) -> set[str]:
        """Ids of the passages that are stored with their text in a record that the scope may read."""
        held: set[str] = set()
        for place in readable(scope):
            rest = {record_id(id, place): passage for id, passage in passages.items() if id not in held}
            held.update(passage_id(key) for key in self.matching("text_hash", text_hash, rest))
        return held

    def find(self, ids: Sequence[str], scope: str, texts: Sequence[str] | None) -> dict[str, tuple[str, Record]]:
        """By passage id, the scope's own record or the default scope's; with `texts`, only records with those texts."""
        passages = None if texts is None else to_passages(texts, ids, repeats=True)
        places = readable(scope)
        stored = self.rows([record_id(id, place) for id in ids for place in places])
        found: dict[str, tuple[str, Record]] = {}
        for id in dict.fromkeys(ids):
            for key in (record_id(id, place) for place in places):
                if key not in stored:
                    continue
                if passages and stored[key].get("text_hash") != text_hash(self._bundle.fingerprint, key, passages[id]):
                    continue
                found[id] = (key, self._verified(key, stored[key]))
                break
        return found

    def unreadable(self) -> dict[str, bool]:
        """The ids of unreadable records, in all scopes, and whether each lacks nothing but this key's signature."""
        found: dict[str, bool] = {}
        for ids in pages(self.ids()):
            for id, row in self.rows(ids).items():
                signed = intact = False
                with suppress(PayloadError):
                    record = Record.read(id, row)
                    record.soft_context(id)
                    record.passage(id, self._bundle.fingerprint)
                    intact = True
                    record.check_signatures(id, self.signer)
                    signed = True
                if not signed:
                    found[id] = intact
        return found

    def remember(self, records: Iterable[tuple[str, Record]]) -> None:
        """Remember the ids of these records by their markers."""
        if len(self._ids_by_marker) > _REMEMBERED:
            self._ids_by_marker = {}
        self._ids_by_marker.update({record.marker: id for id, record in records})

    def by_marker(self, markers: Iterable[Marker]) -> dict[Marker, tuple[str, Record]]:
        """The id of the record that each marker stands for, and the record.

        Raises:
            MissingPassageError: there is none for a marker.
        """
        wanted = {each: [scoped_marker_id(each.passage, place) for place in readable(each.scope)] for each in markers}
        known = [id for names in wanted.values() for name in names if (id := self._ids_by_marker.get(name))]
        rows = self.rows(known)
        by_name = {str(row.get("marker")): id for id, row in rows.items()}
        rest = [name for names in wanted.values() if by_name.keys().isdisjoint(names) for name in names]
        for part in pages(list(dict.fromkeys(rest))):
            more = self._read(partial(Records.rows_with, field="marker", values=part), rows)
            rows |= more
            by_name |= {row["marker"]: id for id, row in more.items()}
        self._ids_by_marker |= by_name
        found = {each: id for each, names in wanted.items() for name in reversed(names) if (id := by_name.get(name))}
        if missing := [marker for marker in wanted if marker not in found]:
            raise MissingPassageError(
                f"no passage in {self.connection.where} for {len(missing)} marker(s) (first: {missing[0].id!r}): it "
                "was deleted or its text changed after the prompt was made, or it was made for one question by "
                "another store object; retrieve again"
            )
        return {marker: (id, self._verified(id, rows[id])) for marker, id in found.items()}

    def upsert(self, records: Mapping[str, Record]) -> None:
        """Write whole records; they are durable when this returns."""
        for part in batches({id: asdict(record) for id, record in records.items()}, _size, _WRITE_BYTES):
            embeddings, rows = [_EMBEDDING] * len(part), list(part.values())
            try:
                self._write(partial(Records.upsert, ids=list(part), embeddings=embeddings, rows=rows))
            except StoreError as error:
                if not self.connection.remote or len(part) > 1 or _size(rows[0]) < _WRITE_BYTES:
                    raise
                raise StoreError(
                    f"passage {passage_id(next(iter(part)))!r} takes {_size(rows[0]):,} bytes as a record, perhaps "
                    f"more than the server accepts in one request: cut it into smaller passages ({error})"
                ) from error

    def update(self, labels: Mapping[str, Labels]) -> None:
        """Write these fields of existing records; their other fields stay."""
        for part in batches({id: asdict(each) for id, each in labels.items()}, _size, _WRITE_BYTES):
            self._write(partial(Records.update, rows=part))

    def delete(self, ids: Sequence[str]) -> None:
        """Delete existing records."""
        for part in pages(ids):
            self._write(partial(Records.delete, ids=part))

    def check_writable(self) -> None:
        """Raise StoreWriteError if the next write would be refused; create the collection if there is none."""
        self._write(lambda records: None)

    def close(self) -> None:
        """Release the engine; closing again has no effect."""
        if self._pid is None:
            return
        forked = self._pid != os.getpid()
        self._pid = None
        if not forked:
            self.connection.close()

    def _verified(self, id: str, row: Row) -> Record:
        """The record in a row; PayloadError, naming the passage, if it was changed or signed with another key."""
        record = Record.read(id, row)
        record.check_signatures(id, self.signer)
        return record

    def _check_open(self) -> None:
        if self._pid is None:
            raise StoreError(f"the store in {self.connection.where} was closed: open it again")
        if self._pid != os.getpid():
            raise StoreError(
                f"the store in {self.connection.where} was opened before a fork, and Chroma would hang in the child: "
                "start processes with 'spawn' and open the store in each"
            )

    def _read(self, work: Callable[[Records], T], default: T) -> T:
        """What `work` returns for the collection; `default` before the first write."""
        self._check_open()

        def found(client: Chroma | None) -> T:
            records = client and self._of(client)
            return work(records) if records else default

        return self.connection.read(found, self._read_timeout)

    def _write(self, work: Callable[[Records], None]) -> None:
        self._check_open()
        self.connection.write(lambda client: work(self._of(client) or self._created(client)), self._timeout)

    def _of(self, client: Chroma) -> Records | None:
        found = self._found
        if found is not None and found[0] is client:
            return found[1]
        records = client.find(self.connection.collection)
        return None if records is None else self._checked(client, records)

    def _created(self, client: Chroma) -> Records:
        about = {
            "ctx_format": FORMAT,
            "bundle": self._bundle.config.name,
            "fingerprint": self._bundle.fingerprint,
            "base_ratio": self.ratio,
            "codec": self.codec,
        }
        # Another client may have created it first: then its metadata stay, and are checked.
        return self._checked(client, client.create(self.connection.collection, _CONFIGURATION, about))

    def _checked(self, client: Chroma, records: Records) -> Records:
        about, where, bundle = records.metadata, self.connection.where, self._bundle
        again = f"index again into another folder or collection, or after client.delete_collection({records.name!r})"
        if "ctx_format" not in about:
            raise StoreError(f"the collection {records.name!r} in {where} is not a store: choose another name")
        if about["ctx_format"] != FORMAT:
            raise StoreError(
                f"the store {records.name!r} in {where} has format {short_repr(about['ctx_format'])}, and this version "
                f"reads {FORMAT}: {again}"
            )
        kinds = {"bundle": str, "fingerprint": str, "codec": str, "base_ratio": int}
        if odd := [name for name, kind in kinds.items() if type(about.get(name)) is not kind or not about[name]]:
            raise StoreError(f"the store {records.name!r} in {where} has no valid {odd[0]}: {again}")
        if about["fingerprint"] != bundle.fingerprint:
            raise FingerprintMismatchError(
                f"the soft contexts in {records.name!r} ({where}) were made by bundle {about['bundle']!r}, "
                f"fingerprint {about['fingerprint'][:12]}, and {bundle.config.name!r}, fingerprint "
                f"{bundle.fingerprint[:12]}, cannot read them: take that bundle, or {again}"
            )
        for name, asked, has in (
            ("codec", self._codec_asked, about["codec"]),
            ("ratio", self._ratio_asked, about["base_ratio"]),
        ):
            if asked not in (None, has):
                raise StoreError(
                    f"the store in {where} has {name} {has!r}, not {asked!r}: leave {name} out, or index again under "
                    "another collection name"
                )
        self._about, self._found = about, (client, records)
        return records


def _size(row: Row) -> int:
    return sum(len(str(value)) for value in row.values())
