"""SoftContextStore: soft contexts in a Chroma collection beside the app's own."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Self

import chromadb
from tqdm.auto import tqdm

from ctx_compress_rag.bundle.config import seconds, whole
from ctx_compress_rag.errors import ConfigError, FingerprintMismatchError, MissingPassageError, RatioError, StoreError
from ctx_compress_rag.methods.base.reading import TransientContext
from ctx_compress_rag.process_bound import OfThisProcess
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import audit
from ctx_compress_rag.store import record as records
from ctx_compress_rag.store.codec import payload_codec
from ctx_compress_rag.store.collection import Companion
from ctx_compress_rag.store.collections import as_documents, passages_in
from ctx_compress_rag.store.connect import Location, connect
from ctx_compress_rag.store.keyring import Keyring
from ctx_compress_rag.store.lock import DEFAULT_TIMEOUT
from ctx_compress_rag.store.lookup import Lookup, checked_ids
from ctx_compress_rag.store.marker import (
    DEFAULT_SCOPE,
    MAX_FACTOR,
    Marker,
    OnUnreadable,
    check_scope,
    current_scope,
)
from ctx_compress_rag.store.names import Record
from ctx_compress_rag.store.pages import WRITE_RECORDS
from ctx_compress_rag.store.passage import (
    AddReport,
    Compresses,
    Passage,
    StoredPassage,
    StoreInfo,
    SyncReport,
    content_id,
    passage_batches,
    to_passages,
)
from ctx_compress_rag.store.scope import own_id, owned, plain_name, record_id, scoped_name
from ctx_compress_rag.store.transient import TransientContexts


class SoftContextStore(OfThisProcess):
    """The soft contexts of one bundle, by passage id, in Chroma.

    They live in a companion collection `<collection>-ctx`, one record per passage, and not in the app's own, where
    every search hit would carry them. Several threads may read and write. Several processes may use one folder: a write
    holds the folder's lock exclusively and waits for other writes; a read waits at most for the write in progress. A
    read-only folder can be read. Several machines may share a Chroma server. A store does not survive `fork`: open it
    in the child.

    Args:
        location: a folder, a Chroma client (embedded or HttpClient), or the app's own collection; the companion is
            then put beside it.
        bundle: the bundle that compresses passages; a store made with another bundle is refused.
        collection: name of the app's collection (it need not exist), from which the companion gets its name; ignored
            if `location` is a collection.
        codec: "int8", "fp16" or "int4" for a new store; an existing one keeps its own.
        ratio: source tokens per slot in a new store; by default the bundle's base ratio. An existing store
            keeps its own. If the bundle's method is nestable, coarser ratios can be requested later; otherwise
            only the store's ratio.
        key: secret that signs markers; by default the one that `keys.find_key` finds.
        scope: default tenant or user, if neither the call nor `stores.markers.scope` names one.
        lock_timeout: seconds that a write waits for writes of other processes, 0 or more. A read waits as long for
            the write in progress, but at least 30 seconds.

    Raises:
        FingerprintMismatchError: the store was made with another bundle.
        StoreError: the store cannot be opened, or has another format, codec or ratio than expected.
        StoreWriteError: there is no store yet, and this user may not create one there.
        RatioError: the bundle cannot make this ratio.
        ConfigError: an argument has an impossible value.
    """

    def __init__(
        self,
        location: Location,
        bundle: Compresses,
        *,
        collection: str = "passages",
        codec: str | None = None,
        ratio: int | None = None,
        key: bytes | None = None,
        scope: str = DEFAULT_SCOPE,
        lock_timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if isinstance(bundle, str | PathLike):
            raise ConfigError(f"bundle={bundle!r} is a name: give Bundle.from_pretrained({str(bundle)!r})")
        self.bundle = bundle
        self.scope = check_scope(scope)
        if ratio is not None:
            ratio = whole("ratio", ratio)
            bundle.check_ratio(ratio)
        timeout = seconds("lock_timeout", lock_timeout)
        self._companion = Companion(connect(location, collection), bundle, codec, ratio, timeout)
        self._keyring = Keyring(self._companion, key)
        self._lookup = Lookup(self._companion, self._keyring)
        self._transient = TransientContexts()
        self._writing = threading.RLock()

    # Writing

    def add(
        self,
        documents: Iterable[object],
        ids: Sequence[str] | None = None,
        progress: bool = True,
        scope: str | None = None,
    ) -> AddReport:
        """Compress and store documents that are new or whose text changed; update metadata that changed.

        Batches are stored one by one: what the progress bar counts is on disk, and after an interruption the same
        call resumes where it stopped. If one document is invalid, nothing is written.

        On an empty store, the same call stores the same bits if machine and number of threads are the same. Passages
        added one by one, in other groups or after an interruption are encoded in other batches, so floating-point
        sums differ slightly: with the bundle `demo`, a quarter to two thirds of records differ, by at most 1.2 int8
        steps, or 1/4000 of a passage's norm.

        Args:
            documents: strings, Passages, LangChain Documents or LlamaIndex nodes; a Chroma collection, or what its
                `get` returned.
            ids: one per document; by default the document's own id or, without one, a hash of its text.
            progress: show a progress bar.
            scope: tenant or user that owns the passages; by default that of `markers.scope`, otherwise the store's.
                Passages of the scope "default" can be read in every scope, those of another scope only in that scope.

        Raises:
            ConfigError: a text is blank or not a str, or an id is empty or given twice.
            PayloadError: the bundle made a NaN or infinity; its batch is not stored.
            StoreLockedError: other processes wrote for longer than `lock_timeout`, or a server runs on this folder.
            StoreWriteError: the folder is read-only, or its disk is full.
        """
        scope = self._scope(scope)
        checked = to_passages(as_documents(documents), ids)
        passages = {record_id(id, scope): passage for id, passage in checked.items()}
        with self._writing:
            same = self._lookup.matching("full_hash", records.full_hash, passages)
            todo = {key: passage for key, passage in passages.items() if key not in same}
            present = self._companion.existing(list(todo))
            relabel = self._lookup.matching("text_hash", records.text_hash, todo)
            signer = self._keyring.signer()
            self._companion.update({key: records.labels(self.fingerprint, key, todo[key], signer) for key in relabel})
            self._compress({key: passage for key, passage in todo.items() if key not in relabel}, scope, progress)
        return AddReport(len(todo) - len(present), len(present), len(same))

    def put(self, passages: Sequence[Passage], made: Mapping[str, Any], scope: str | None = None) -> None:
        """Store passages that were compressed elsewhere, by `ray_indexing.worker.CompressPassages`.

        Args:
            passages: the passages; those already stored are overwritten.
            made: `payload` and `fingerprint` of each passage, as the worker made them.
            scope: tenant or user that owns the passages; by default as in `add`.

        Raises:
            FingerprintMismatchError: another bundle made the payloads.
            ConfigError: a payload has another codec than the store, or a passage is one that `add` refuses.
            PayloadError: a payload is damaged; nothing of this call is stored.
        """
        scope = self._scope(scope)
        checked = to_passages(passages)
        payloads = [str(payload) for payload in made["payload"]]
        if other := next((str(each) for each in made["fingerprint"] if each != self.bundle.fingerprint), None):
            raise FingerprintMismatchError(
                f"payloads made by a bundle with fingerprint {other[:12]} cannot go into a store of bundle "
                f"{self.bundle.config.name!r} ({self.bundle.fingerprint[:12]}): give the workers the store's bundle"
            )
        if {payload_codec(payload) for payload in payloads} - {self.codec}:
            raise ConfigError(f"a payload has another codec than the store: give the workers codec={self.codec!r}")
        with self._writing:
            self._put({record_id(id, scope): passage for id, passage in checked.items()}, payloads, scope)

    def sync(self, collection: chromadb.Collection, progress: bool = True, scope: str | None = None) -> SyncReport:
        """Make the scope's passages match the app's collection: add new and changed ones, delete those not in it.

        Records without a text are skipped. Raises as `add` does.

        Args:
            collection: the app's collection.
            progress: show a progress bar.
            scope: tenant or user whose passages the collection holds; by default as in `add`.
        """
        before = self.ids(scope)  # what others store after the collection was read is not deleted
        passages = list(passages_in(collection))
        report = self.add(passages, progress=progress, scope=scope)
        gone = sorted(set(before) - {str(passage.id) for passage in passages})
        return SyncReport(report.added, report.updated, report.unchanged, self.delete(gone, scope))

    def ensure(self, texts: Sequence[str], ids: Sequence[str] | None = None, scope: str | None = None) -> list[str]:
        """Compress and store texts that are not stored under their ids; return the id of each text, in order.

        Like `add`, but for a retriever's results: an id may come twice, metadata of an unchanged text stay as
        stored, passages of the scope "default" are not stored again, there is no progress bar, and no write lock
        is taken if nothing is missing.
        """
        scope = self._scope(scope)
        passages = to_passages(texts, ids, repeats=True)
        if len(self._lookup.holding(passages, scope)) < len(passages):
            with self._writing:  # look again: another thread may have stored the same passages
                held = self._lookup.holding(passages, scope)
                missing = {record_id(id, scope): passage for id, passage in passages.items() if id not in held}
                self._compress(missing, scope, progress=False)
        return [content_id(text) for text in texts] if ids is None else list(ids)

    def delete(self, ids: Sequence[str], scope: str | None = None) -> int:
        """Delete passages of the scope; return how many there were. `ctx-compress vacuum` overwrites their bytes."""
        scope = self._scope(scope)
        with self._writing:
            present = self._companion.existing([record_id(id, scope) for id in checked_ids(ids)])
            self._companion.delete(present)
        return len(present)

    def damaged(self) -> list[str]:
        """The ids of passages in all scopes with records damaged or not sealed with this key. Reads every record."""
        return [own_id(key) for key in audit.unreadable(self._companion, self._keyring.signer())]

    def discard_damaged(self, *, unsealed: bool = True) -> list[str]:
        """Delete what `damaged` finds; the next `add` of the same passages compresses them again.

        Args:
            unsealed: also delete intact records that are not sealed with this key; if False, they raise an error.

        Raises:
            StoreError: `unsealed` is False and there are such records; nothing is deleted.
        """
        bad = audit.unreadable(self._companion, self._keyring.signer())
        if not unsealed and (kept := [own_id(key) for key, is_whole in bad.items() if is_whole]):
            raise StoreError(
                f"{len(kept)} records (first: {kept[0]!r}) are intact but not sealed with the key in use: set "
                "CTX_COMPRESS_KEY to the key that sealed them; if it is lost, `ctx-compress repair --reseal` "
                "keeps them, and SoftContextStore.discard_damaged() deletes them"
            )
        self._companion.delete(list(bad))
        return [own_id(key) for key in bad]

    def reseal(self) -> int:
        """Reseal, with the store's key, records that have no seal or another key's; return how many.

        Damaged records are skipped: the text must match its hash, and the payload the counts. Do this only if you know
        that nobody else could write to the store: without the old key, a forged record looks genuine.
        """
        with self._writing:
            return audit.reseal(self._companion, self._keyring.signer())

    def close(self) -> None:
        """Close the engine; the store cannot be used afterwards. Closing it again has no effect."""
        self._companion.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Reading

    def get(
        self, ids: Sequence[str], scope: str | None = None, texts: Sequence[str] | None = None
    ) -> list[SoftContext | None]:
        """Soft contexts at the base ratio, in the order of the ids; None for an id that is not stored.

        Args:
            ids: passage ids.
            scope: tenant or user that reads; by default the scope of `markers.scope`, otherwise the store's.
            texts: one per id; a record with another text counts as not stored.

        Raises:
            PayloadError: a record is damaged; the message names the passage.
        """
        found = {id: records.read_soft(*each) for id, each in self._find(ids, scope, texts).items()}
        return [found.get(id) for id in ids]

    def get_passages(
        self, ids: Sequence[str], scope: str | None = None, texts: Sequence[str] | None = None
    ) -> list[StoredPassage | None]:
        """Text, metadata and sizes, in the order of the ids; None for an id that is not stored. See `get`."""
        found = {
            id: records.read_passage(*each, self.fingerprint) for id, each in self._find(ids, scope, texts).items()
        }
        return [found.get(id) for id in ids]

    def has(self, texts: Sequence[str], ids: Sequence[str] | None = None, scope: str | None = None) -> list[bool]:
        """Whether each text is stored under its id: False if the id is missing or stored with another text."""
        held = self._lookup.holding(to_passages(texts, ids, repeats=True), self._scope(scope))
        return [id in held for id in ([content_id(text) for text in texts] if ids is None else ids)]

    def ids(self, scope: str | None = None) -> list[str]:
        """The ids of the scope's own passages."""
        scope = self._scope(scope)
        return [own_id(key) for key in self._companion.ids() if owned(key, scope)]

    def __len__(self) -> int:
        """How many passages there are, of all scopes."""
        return self._companion.count()

    def __bool__(self) -> bool:
        """True, even when empty: `if store` asks whether there is a store."""
        return True

    def info(self) -> StoreInfo:
        """What the store holds, in all scopes."""
        sizes, connection = self._companion.sizes(), self._companion.connection
        return StoreInfo(
            location=connection.where,
            collection=connection.companion,
            bundle=self.bundle.config.name,
            fingerprint=self.fingerprint,
            codec=self.codec,
            base_ratio=self.base_ratio,
            passages=sizes.records,
            slots=sizes.slots,
            source_tokens=sizes.tokens,
            payload_bytes=sizes.payload,
            disk_bytes=connection.disk_bytes(),
        )

    @property
    def fingerprint(self) -> str:
        """The bundle's fingerprint in the form used when the store was made, as in passages and markers."""
        return self._companion.fingerprint

    @property
    def codec(self) -> str:
        """Name of the codec that soft contexts are stored with."""
        return self._companion.codec

    @property
    def base_ratio(self) -> int:
        """Source tokens per slot of the stored soft contexts."""
        return self._companion.ratio

    def merge_factor(self, ratio: int) -> int:
        """How many stored slots are merged into one at a ratio.

        Raises:
            RatioError: the ratio cannot be made from what is stored.
        """
        ratio = whole("ratio", ratio)
        base = self.base_ratio
        factor = self.bundle.compressor.merge_factor(ratio, base)
        if factor > MAX_FACTOR:
            raise RatioError(f"ratio {ratio} is too coarse: choose a multiple of {base} up to {base * MAX_FACTOR}")
        return factor

    # Markers

    def marker(self, id: str, ratio: int, scope: str | None = None) -> str:
        """The marker that stands for a passage in a prompt; see `markers`."""
        return self.markers([id], ratio, scope)[0]

    def markers(
        self, ids: Sequence[str], ratio: int, scope: str | None = None, texts: Sequence[str] | None = None
    ) -> list[str]:
        """The markers that stand for passages in a prompt, with `ratio` source tokens per slot.

        Args:
            ids: passage ids.
            ratio: a multiple of the store's base ratio.
            scope: tenant or user; by default the scope of `stores.markers.scope`, otherwise the store's.
            texts: one per id; a record with another text counts as not stored.

        Raises:
            ConfigError: the bundle reads passages question by question.
            RatioError: the ratio cannot be made from the base ratio.
            MissingPassageError: an id is not stored, or is stored with another text.
            PayloadError: a record is damaged; the message names the passage.
        """
        factor, scope = self.merge_factor(ratio), self._scope(scope)
        found = self._find(ids, scope, texts)
        missing = [id for id in ids if id not in found]
        if missing:
            raise MissingPassageError(f"passage {missing[0]!r} is not stored ({len(missing)} missing): add it first")
        for key, stored in dict(found.values()).items():
            records.check_payload(key, stored)
        signer = self._keyring.signer()
        self._lookup.names.learn(found.values())
        written = []
        for id in ids:
            slots = found[id][1]["slots"]
            merged = min(factor, slots)  # all larger factors mean one slot
            written.append(signer.write(plain_name(found[id][1]["marker"]), merged, -(-slots // merged), scope))
        return written

    def transient_markers(self, contexts: Sequence[TransientContext], scope: str | None = None) -> list[str]:
        """The markers that stand for parts of passages whose slots were made for one question, in order.

        Only this object's memory has the slots, and only the last 16,384 of a scope: use the markers soon.

        Args:
            contexts: the parts that one prompt needs.
            scope: tenant or user; by default the scope of `stores.markers.scope`, otherwise the store's.

        Raises:
            ConfigError: the parts need more slots together than are kept.
        """
        scope, signer = self._scope(scope), self._keyring.signer()
        names = [signer.transient(*each.key) for each in contexts]
        self._transient.put(scope, dict(zip(names, contexts, strict=True)))
        return [signer.write(name, 1, each.soft.n_slots, scope) for name, each in zip(names, contexts, strict=True)]

    def split(self, text: str, scope: str | None = None, on_unreadable: OnUnreadable = "text") -> list[str | Marker]:
        """Text parts and markers of a prompt, in order.

        Raises:
            UnreadableMarkerError: a marker has another key or scope, and on_unreadable is "error"; else it is text.
        """
        return self._keyring.signer().split(text, self._scope(scope), on_unreadable)

    def fetch(self, markers: Sequence[Marker]) -> list[SoftContext]:
        """The soft contexts that markers stand for, at the markers' ratios, in order.

        Raises:
            MissingPassageError: a passage was deleted or its text changed since the marker was written, or slots made
                for one question are no longer in memory.
            PayloadError: a record is damaged.
        """
        held, found = self._by_marker(markers)
        base = {key: records.read_soft(key, stored) for key, stored in dict(found.values()).items()}
        return [
            held[marker].soft if marker in held else base[found[marker][0]].merge(marker.factor) for marker in markers
        ]

    def text_of(self, markers: Sequence[Marker]) -> list[str]:
        """The texts that markers stand for, in order. Raises as `fetch` does."""
        held, found = self._by_marker(markers)
        texts = {
            key: records.read_passage(key, stored, self.fingerprint).text
            for key, stored in dict(found.values()).items()
        }
        return [held[marker].text if marker in held else texts[found[marker][0]] for marker in markers]

    # Inside

    def _compress(self, passages: dict[str, Passage], scope: str, progress: bool) -> None:
        if not passages:
            return
        self._companion.check_writable()  # fail before the work, not after it
        with tqdm(total=len(passages), desc="compressing", unit="passage", disable=not progress) as bar:
            for batch in passage_batches(passages, WRITE_RECORDS):
                softs = self.bundle.compress([passage.text for passage in batch.values()], ratio=self.base_ratio)
                each = zip(batch.values(), softs, strict=True)
                self._put(batch, [records.payload_of(passage, soft, self.codec) for passage, soft in each], scope)
                bar.update(len(batch))

    def _put(self, passages: dict[str, Passage], payloads: Sequence[str], scope: str) -> None:
        signer = self._keyring.signer()
        rows = {
            key: records.record(
                key,
                passage,
                payload,
                fingerprint=self.fingerprint,
                marker=scoped_name(signer.passage(passage.text), scope),
                signer=signer,
            )
            for (key, passage), payload in zip(passages.items(), payloads, strict=True)
        }
        self._companion.upsert(rows)

    def _find(self, ids: Sequence[str], scope: str | None, texts: Sequence[str] | None) -> dict[str, Record]:
        return self._lookup.by_id(ids, self._scope(scope), texts)

    def _by_marker(self, markers: Sequence[Marker]) -> tuple[dict[Marker, TransientContext], dict[Marker, Record]]:
        """By marker, what this object holds in memory, and the records of the others; none is missing."""
        held = {each: context for each in markers if (context := self._transient.get(each.scope, each.passage))}
        return held, self._lookup.by_marker([marker for marker in markers if marker not in held])

    def _scope(self, scope: str | None) -> str:
        return current_scope() or self.scope if scope is None else check_scope(scope)
