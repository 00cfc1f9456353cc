"""The records of one bundle's soft contexts, signed when written, and checked by their signature when read."""

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ctx_compress_rag import errors
from ctx_compress_rag.bundle.exported import AnyBundle
from ctx_compress_rag.errors import ConfigError, short_repr
from ctx_compress_rag.methods.base.rendering import TransientPart
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store.codec import DEFAULT_CODEC, check_codec, payload_bytes
from ctx_compress_rag.store.collection import ChromaCollection, Row, chroma_batches, chroma_pages
from ctx_compress_rag.store.key import StoreKey
from ctx_compress_rag.store.marker import Marker, Signer
from ctx_compress_rag.store.passage import Passage, StoreInfo, listed_passages
from ctx_compress_rag.store.place import StorePlace
from ctx_compress_rag.store.record import (
    FoundRecord,
    Record,
    pack_sentence_vectors,
    passage_id,
    readable_scopes,
    record_full_hash,
    record_id,
    record_text_hash,
    scoped_marker_id,
    sentence_vectors,
)

MAX_SLOTS = 16_384  # how many slots are kept for all tenants together; a slot takes four bytes for each dimension


class TransientParts:
    """The parts of passages that were used last, by marker, of at most `most` slots together. Thread-safe.

    They are not stored, because readers do not hold the store's write lock, and every question would add slots.
    """

    def __init__(self, most: int = MAX_SLOTS) -> None:
        self._most = most
        self._parts: OrderedDict[str, TransientPart] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, parts: Mapping[str, TransientPart]) -> None:
        """Keep the parts of one prompt, and drop those used longest ago. Raise ConfigError if these are too many."""
        needed = sum(map(_cost, parts.values()))
        if needed > self._most:
            raise ConfigError(f"a prompt needs {needed} slots of its own, {self._most} are kept: use fewer passages")
        with self._lock:
            for marker, part in parts.items():
                self._parts[marker] = part
                self._parts.move_to_end(marker)
            size = sum(map(_cost, self._parts.values()))
            while size > self._most:
                size -= _cost(self._parts.popitem(last=False)[1])

    def split(self, markers: Sequence[Marker]) -> tuple[dict[Marker, TransientPart], list[Marker]]:
        """Return the kept part of each marker that has one, and the other markers."""
        with self._lock:
            kept = {marker: self._parts[marker.text] for marker in markers if marker.text in self._parts}
            for marker in kept:
                self._parts.move_to_end(marker.text)
        return kept, [marker for marker in markers if marker not in kept]


def _cost(part: TransientPart) -> int:
    return max(1, part.soft.n_slots)  # a part without slots takes memory, too


FORMAT = 7
_WRITE_BYTES = 8 << 20  # a server refuses bodies beyond 40 MiB
_EMBEDDING = [0.0]  # Chroma requires an embedding; one dimension costs least
# Nobody searches the dummy embeddings, so the graph is as small as Chroma allows. Synchronizing every 100
# records (not 1000) makes the first read after reopening 18-48 ms instead of 250-830 ms.
_CONFIGURATION: Any = {
    "hnsw": {"sync_threshold": 100, "batch_size": 100, "max_neighbors": 2, "ef_construction": 2, "ef_search": 2}
}


@dataclass(frozen=True)
class RecordChanges:
    """How given passages, by record id, differ from what is stored."""

    texts: dict[str, Passage]  # passages not stored with this text, which must be compressed
    labels: dict[str, Passage]  # passages stored with this text, but with other metadata
    new: int  # how many of `texts` have ids that are not stored
    unchanged: int


class Records(ChromaCollection):
    """The Chroma collection of a store. `SoftContextStore` describes the arguments and the errors. Thread-safe."""

    def __init__(
        self,
        place: StorePlace,
        name: str,
        bundle: AnyBundle,
        key: StoreKey,
        codec: str | None,
        ratio: int | None,
        lock_timeout: float,
        read_timeout: float,
    ) -> None:
        self._bundle, self._key = bundle, key
        self._asked = {"codec": None if codec is None else check_codec(codec), "base_ratio": ratio}
        new: Row = {
            "ctx_format": FORMAT,
            "bundle": bundle.config.name,
            "fingerprint": bundle.fingerprint,
            "base_ratio": ratio or bundle.config.base_ratio,
            "codec": codec or DEFAULT_CODEC,
        }
        super().__init__(place, name, _CONFIGURATION, new, lock_timeout, read_timeout)
        try:
            self.about: Row = self.metadata() or new
        except BaseException:
            self.close()
            raise

    @property
    def codec(self) -> str:
        return str(self.about["codec"])

    @property
    def signer(self) -> Signer:
        return self._key.signer(self._bundle.fingerprint)

    def check(self, metadata: Row) -> None:
        where, bundle = self.place.where, self._bundle
        again = f"index again into another folder or collection, or after client.delete_collection({self.name!r})"
        if "ctx_format" not in metadata:
            raise errors.StoreError(f"the collection {self.name!r} in {where} is not a store: choose another name")
        if metadata["ctx_format"] != FORMAT:
            raise errors.StoreError(
                f"the store {self.name!r} in {where} has format {short_repr(metadata['ctx_format'])}, and this version "
                f"reads {FORMAT}: run `ctx-compress index` with another --index, or {again}"
            )
        kinds = {"bundle": str, "fingerprint": str, "codec": str, "base_ratio": int}
        if odd := [name for name, kind in kinds.items() if type(metadata.get(name)) is not kind or not metadata[name]]:
            raise errors.StoreError(f"the store {self.name!r} in {where} has no valid {odd[0]}: {again}")
        if metadata["fingerprint"] != bundle.fingerprint:
            raise errors.FingerprintMismatchError(
                f"the soft contexts in {self.name!r} ({where}) were made by bundle {metadata['bundle']!r}, "
                f"fingerprint {metadata['fingerprint'][:12]}, and {bundle.config.name!r}, fingerprint "
                f"{bundle.fingerprint[:12]}, cannot read them: take that bundle, or {again}"
            )
        for name, asked in self._asked.items():
            if asked not in (None, metadata[name]):
                option = name.removeprefix("base_")
                raise errors.StoreError(f"{where} has {option} {metadata[name]!r}: leave {option}={asked!r} out")
        self.about = metadata

    # Reading

    def find(self, ids: Sequence[str], scope: str, texts: Sequence[str] | None) -> list[FoundRecord | None]:
        """Return the record of each passage id, of the scope or else of the default scope; None if there is none.

        With `texts`, one for each id, only a record with that text is returned.
        """
        passages = [None] * len(ids) if texts is None else listed_passages(texts, ids)
        places, made = readable_scopes(scope), self._bundle.fingerprint
        stored = self.rows([record_id(id, place) for id in ids for place in places])
        found: list[FoundRecord | None] = []
        for id, passage in zip(ids, passages, strict=True):
            rows = {own: stored[own] for place in places if (own := record_id(id, place)) in stored}
            if passage is not None:
                rows = {k: row for k, row in rows.items() if row.get("text_hash") == record_text_hash(made, k, passage)}
            found.append(next((self._verified(own, row) for own, row in rows.items()), None))
        return found

    def by_marker(self, markers: Iterable[Marker]) -> dict[Marker, FoundRecord]:
        """Return the record of each marker's passage. Raise MissingPassageError if one is missing."""
        wanted = {
            each: [scoped_marker_id(each.passage, place) for place in readable_scopes(each.scope)] for each in markers
        }
        rows = self.rows_with("marker", [name for names in wanted.values() for name in names])
        by_name = {row["marker"]: id for id, row in rows.items()}
        found = {each: id for each, names in wanted.items() for name in reversed(names) if (id := by_name.get(name))}
        if missing := [marker for marker in wanted if marker not in found]:
            raise errors.MissingPassageError(
                f"no passage in {self.place.where} for {len(missing)} marker(s) (first: {missing[0].id!r}): it "
                "was deleted or its text changed after the prompt was made, or it was made for one question and is no "
                "longer in memory; retrieve again"
            )
        return {marker: self._verified(id, rows[id], marker.factor) for marker, id in found.items()}

    def has_passages(self, passages: Sequence[Passage], scope: str) -> list[bool]:
        """Return, for each passage, whether a record that the scope may read holds it with its text."""
        held: set[tuple[str, str]] = set()
        wanted = list(dict.fromkeys((str(each.id), each.text) for each in passages))
        while wanted:  # in turns, if an id comes with several texts
            turn = dict(reversed(wanted))
            for place in readable_scopes(scope):
                rest = {record_id(id, place): Passage(text, id) for id, text in turn.items() if (id, text) not in held}
                found = map(passage_id, self._matching("text_hash", record_text_hash, rest))
                held.update((id, turn[id]) for id in found)
            wanted = [(id, text) for id, text in wanted if turn[id] != text]
        return [(str(each.id), each.text) in held for each in passages]

    def unreadable(self, sample: int | None = None) -> dict[str, bool]:
        """Return the ids of unreadable records of all scopes, each with True if it is intact but of another key.

        `sample` is the number of records to check, drawn at random; None checks all.
        """
        found: dict[str, bool] = {}
        everything = self.ids()
        drawn = everything if sample is None else random.sample(everything, min(sample, len(everything)))
        for ids in chroma_pages(drawn):
            for id, row in self.rows(ids).items():
                intact = False
                try:
                    record = Record.read(id, row)
                    record.soft_context(id)
                    record.passage(id, self._bundle.fingerprint)
                    intact = True
                    self._verified(id, row)
                except errors.PayloadError:
                    found[id] = intact
        return found

    # Writing

    def compare(self, passages: Mapping[str, Passage]) -> RecordChanges:
        """Return which of these passages, by record id, must be written. Raise StoreError if writing is impossible."""
        same = self._matching("full_hash", record_full_hash, passages)
        rest = {id: passage for id, passage in passages.items() if id not in same}
        relabeled = self._matching("text_hash", record_text_hash, rest)
        labels = {id: passage for id, passage in rest.items() if id in relabeled}
        texts = {id: passage for id, passage in rest.items() if id not in relabeled}
        if texts:
            self.prepare()
        return RecordChanges(texts, labels, len(texts) - len(self.existing(list(texts))), len(same))

    def prepare(self) -> None:
        """Raise StoreError if the next write would be refused. Call it before the work that a write needs."""
        self._key.keep()
        self.check_writable()

    def relabel(self, passages: Mapping[str, Passage]) -> None:
        """Write the metadata of passages that are stored with the same text."""
        stored = self.rows(list(passages))
        made = self._bundle.fingerprint
        self._put({id: self._verified(id, row).record.relabeled(id, passages[id], made) for id, row in stored.items()})

    def write(self, passages: Mapping[str, Passage], softs: Sequence[SoftContext], scope: str) -> None:
        """Write a scope's passages, by record id, durably. If a PayloadError (a NaN) is raised, none is written."""
        each = zip(passages.items(), softs, self._sentences(passages), strict=True)
        made: dict[str, Record] = {}
        for (id, passage), soft, sentences in each:
            marker = scoped_marker_id(self.signer.passage(passage.text), scope)
            made[id] = Record.of(id, passage, soft, sentences, self.codec, marker, self._bundle.fingerprint)
        self._put(made)

    def _put(self, records: Mapping[str, Record]) -> None:
        if records:
            self._key.keep()
        rows = {id: asdict(record.signed(id, self.signer, self.name)) for id, record in records.items()}
        for part in chroma_batches(rows, _size, _WRITE_BYTES):
            try:
                self.upsert(list(part), [_EMBEDDING] * len(part), list(part.values()))
            except errors.StoreError as error:
                size = _size(next(iter(part.values())))
                if not self.place.remote or len(part) > 1 or size < _WRITE_BYTES:
                    raise
                raise errors.StoreError(
                    f"passage {passage_id(next(iter(part)))!r} takes {size:,} bytes as a record, perhaps more than the "
                    f"server accepts in one request: cut it into smaller passages ({error})"
                ) from error

    def _sentences(self, passages: Mapping[str, Passage]) -> list[str]:
        """Return the vectors of each passage's sentences, or "" if the bundle shows none or MiniLM is not installed."""
        if self._bundle.config.text_share:
            with suppress(errors.MissingExtraError):
                vectors = sentence_vectors([passage.text for passage in passages.values()])
                return [*map(pack_sentence_vectors, vectors)]
        return [""] * len(passages)

    def _matching(
        self, field: str, digest: Callable[[str, str, Passage], str], passages: Mapping[str, Passage]
    ) -> set[str]:
        """Return the record ids whose stored hash equals the passage's hash, without reading a payload."""
        made = self._bundle.fingerprint
        return self.matching(field, {id: digest(made, id, passage) for id, passage in passages.items()})

    def _verified(self, id: str, row: Row, factor: int = 1) -> FoundRecord:
        """Return the record in a row. Raise PayloadError if the record was changed or signed with another key."""
        record = Record.read(id, row)
        record.check_signature(id, self.signer, self.name)
        return FoundRecord(id, record, self._bundle.fingerprint, factor)


def summarize_store(records: ChromaCollection, about: Row) -> StoreInfo:
    """Return the contents and size of a store from its records and metadata. Damaged records do not count."""
    count = slots = tokens = payload_size = 0
    for ids in chroma_pages(records.ids()):
        for row in records.rows(ids).values():
            each, stand_for, payload = row.get("slots"), row.get("tokens"), row.get("payload")
            if isinstance(each, int) and isinstance(stand_for, int) and isinstance(payload, str):
                count, slots, tokens = count + 1, slots + each, tokens + stand_for
                payload_size += payload_bytes(payload)
    return StoreInfo(
        location=records.place.where,
        collection=records.name,
        passages=count,
        slots=slots,
        source_tokens=tokens,
        payload_bytes=payload_size,
        disk_bytes=records.place.disk_bytes(),
        **{name: about[name] for name in ("bundle", "fingerprint", "codec", "base_ratio")},
    )


def _size(row: Row) -> int:
    return sum(len(str(value)) for value in row.values())
