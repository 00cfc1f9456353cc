"""SoftContextStore: soft contexts in a Chroma collection beside the app's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from ctx_compress_rag.errors import ConfigError, MissingPassageError, RatioError
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.stores import records
from ctx_compress_rag.stores.codecs import payload_bytes
from ctx_compress_rag.stores.companion import READ_IDS, WRITE_RECORDS, Companion
from ctx_compress_rag.stores.connect import Location, connect
from ctx_compress_rag.stores.keys import find_key
from ctx_compress_rag.stores.markers import DEFAULT_SCOPE, MAX_FACTOR, Marker, MarkerCodec, current_scope
from ctx_compress_rag.stores.passages import (
    AddReport,
    Compresses,
    Passage,
    StoredPassage,
    StoreInfo,
    content_id,
    to_passages,
)
from ctx_compress_rag.stores.skimmed import Skimmed, SkimmedSlots

_FIRST_BATCH = 8  # passages compressed before the first write; doubled while a batch takes less than ...
_BATCH_SECONDS = 2.0  # ... so that a kill loses little on a slow machine and a fast one has full batches


class SoftContextStore:
    """Soft contexts of one bundle, by passage id, in Chroma.

    They live in a companion collection `<collection>-ctx`, one record per passage, under the passage's
    own id, and never in the app's collection, whose every hit would carry them along. Reads and writes
    may come from several threads. On a path, one process writes at a time: the lock is taken at the first
    write and kept until `close`, the end of a `with` block or of the process. Readers need no lock. A
    store does not survive `fork`: open it in the child.

    Args:
        location: a folder, a Chroma client (embedded or HttpClient), or the app's own collection, beside
            which the companion is put. Spell a path as the process's other Chroma clients do.
        bundle: what compresses passages; a store made with another one is refused.
        collection: name of the collection that this one stands beside (it need not exist); ignored where
            `location` is a collection.
        codec: "int8" or "fp16" for a new store; an existing one keeps its own.
        ratio: source tokens per slot in a new store; by default the bundle's base ratio. An existing store
            keeps its own. Coarser ratios can be asked for later where the bundle's method is nestable; a
            method that is not serves the store's ratio alone.
        key: secret that markers are signed with; see `keys.find_key` for where it comes from otherwise.
        scope: tenant or user that markers belong to where neither the call nor `stores.markers.scope` says so.
        skimmed_slots: how many slots that hold for one question only (close reading) this object keeps in
            memory; beyond that the least recently used go. Each takes the bundle's slot width times 4 bytes.

    Raises:
        FingerprintMismatchError: the store was made with another bundle.
        StoreError: it cannot be opened, is of another format, or has another codec or ratio than asked for.
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
        skimmed_slots: int = 16_384,
    ) -> None:
        if not scope:
            raise ConfigError("a scope needs a name: give the tenant's or user's id")
        if isinstance(bundle, str | PathLike):
            raise ConfigError(f"bundle={bundle!r} is a name: give Bundle.from_pretrained({str(bundle)!r})")
        self.bundle = bundle
        self.scope = scope
        self._companion = Companion(connect(location, collection), bundle, codec, ratio)
        self._markers = None if key is None else MarkerCodec(key, self.fingerprint)
        self._skimmed = SkimmedSlots(skimmed_slots)
        self._writing = threading.RLock()

    # Writing

    def add(self, documents: Iterable[object], ids: Sequence[str] | None = None, progress: bool = True) -> AddReport:
        """Compress and store what is new or whose text changed; the rest is left as it is.

        Stored batch by batch: what the progress bar counts is on disk, and after an interruption the same
        call goes on where it ended. Nothing is written if one of the documents is unusable.

        Args:
            documents: strings, Passages, LangChain Documents or LlamaIndex nodes.
            ids: one per document; by default the document's own id, or else a hash of its text.
            progress: show a progress bar.

        Raises:
            ConfigError: a text is blank or no text, an id is empty or given twice.
            PayloadError: the bundle made a NaN or infinity; the batch with it is not stored.
            StoreLockedError: another process is writing to this path.
        """
        passages = to_passages(documents, ids)
        with self._writing:
            same = self._matching("full_hash", records.full_hash, passages)
            todo = {id: passage for id, passage in passages.items() if id not in same}
            present = self._companion.existing(list(todo))
            relabel = self._matching("text_hash", records.text_hash, todo)
            self._companion.update({id: records.labels(self.fingerprint, todo[id]) for id in relabel})
            self._compress({id: passage for id, passage in todo.items() if id not in relabel}, progress)
        return AddReport(len(todo) - len(present), len(present), len(same))

    def ensure(self, texts: Sequence[str], ids: Sequence[str] | None = None) -> list[str]:
        """Compress and store the texts that are missing or stale under their ids; the id of each text, in order.

        As `add`, but for what a retriever returned: an id may come twice, stored metadata stay as they are
        where the text does, no progress bar, and no writer's lock where nothing is missing.
        """
        passages = to_passages(texts, ids, repeats=True)
        if len(self._matching("text_hash", records.text_hash, passages)) < len(passages):
            with self._writing:  # look again: another thread may have been at the same passages
                fresh = self._matching("text_hash", records.text_hash, passages)
                self._compress({id: passage for id, passage in passages.items() if id not in fresh}, progress=False)
        return [content_id(text) for text in texts] if ids is None else list(ids)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete passages; how many of them were there. `chroma vacuum` gives the disk space back."""
        with self._writing:
            present = self._companion.existing(ids)
            self._companion.delete(present)
        return len(present)

    def close(self) -> None:
        """Let other processes write; the store cannot be used afterwards. Without effect the second time."""
        self._companion.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Reading

    def get(self, ids: Sequence[str]) -> list[SoftContext | None]:
        """Soft contexts at the base ratio, in the order of the ids; None for an id that is not stored.

        Raises:
            PayloadError: a record is damaged; the message names the passage.
        """
        found = {id: records.read_soft(id, stored) for id, stored in self._companion.read(ids).items()}
        return [found.get(id) for id in ids]

    def get_passages(self, ids: Sequence[str]) -> list[StoredPassage | None]:
        """Text, metadata and sizes, in the order of the ids; None for an id that is not stored."""
        found = {id: records.read_passage(id, stored) for id, stored in self._companion.read(ids).items()}
        return [found.get(id) for id in ids]

    def has(self, texts: Sequence[str], ids: Sequence[str] | None = None) -> list[bool]:
        """Whether each text is stored under its id: False where it is missing or stored with another text."""
        passages = to_passages(texts, ids, repeats=True)
        fresh = self._matching("text_hash", records.text_hash, passages)
        return [id in fresh for id in ([content_id(text) for text in texts] if ids is None else ids)]

    def ids(self) -> list[str]:
        """The ids of all passages."""
        return self._companion.ids()

    def __len__(self) -> int:
        return self._companion.count()

    def __bool__(self) -> bool:
        """True, also when empty: `if store` asks whether there is one."""
        return True

    def info(self) -> StoreInfo:
        """What is inside. Reads every record: seconds for a hundred thousand passages."""
        ids = self.ids()
        slots = tokens = size = 0
        for start in range(0, len(ids), READ_IDS):
            for stored in self._companion.read(ids[start : start + READ_IDS]).values():
                slots += stored["slots"]
                tokens += stored["tokens"]
                size += payload_bytes(stored["payload"])
        connection = self._companion.connection
        return StoreInfo(
            location=connection.where,
            collection=connection.companion,
            bundle=self.bundle.config.name,
            fingerprint=self.fingerprint,
            codec=self.codec,
            base_ratio=self.base_ratio,
            passages=len(ids),
            slots=slots,
            source_tokens=tokens,
            payload_bytes=size,
            disk_bytes=_folder_bytes(connection.folder) if connection.folder else None,
        )

    @property
    def fingerprint(self) -> str:
        """The bundle's fingerprint in the form that the store was made with, as it is in passages and markers."""
        return self._companion.fingerprint

    @property
    def codec(self) -> str:
        """Name of the codec that soft contexts are stored with."""
        return self._companion.codec

    @property
    def base_ratio(self) -> int:
        """Source tokens per slot of the stored soft contexts."""
        return self._companion.ratio

    # Markers

    def marker(self, id: str, ratio: int, scope: str | None = None) -> str:
        """The marker that stands for a passage in a prompt; see `markers`."""
        return self.markers([id], ratio, scope)[0]

    def markers(self, ids: Sequence[str], ratio: int, scope: str | None = None) -> list[str]:
        """The markers that stand for passages in a prompt, `ratio` source tokens to a slot.

        Args:
            ids: passage ids.
            ratio: a multiple of the store's base ratio.
            scope: tenant or user; by default the one of `stores.markers.scope`, or else the store's.

        Raises:
            ConfigError: the bundle reads passages question by question (ram).
            RatioError: the ratio cannot be made from the base ratio.
            MissingPassageError: an id is not stored.
        """
        if self.bundle.compressor.question_aware:
            raise ConfigError(
                f"bundle {self.bundle.config.name!r} reads passages question by question: what is stored is there to "
                "choose by, not to be read. Give mode='close_reading' and the question to the postprocessor or to mark"
            )
        factor = self._factor(ratio)
        found = self._companion.read(ids)
        missing = [id for id in ids if id not in found]
        if missing:
            raise MissingPassageError(f"passage {missing[0]!r} is not stored ({len(missing)} are not): add it first")
        signer, scope = self._signer(), self._scope(scope)
        written = []
        for id in ids:
            slots = found[id]["slots"]
            merged = min(factor, slots)  # all larger factors mean one slot
            written.append(signer.write(found[id]["marker"], merged, -(-slots // merged), scope))
        return written

    def skimmed_markers(self, parts: Sequence[Skimmed], scope: str | None = None) -> list[str]:
        """The markers that stand for parts of passages as one question made them slots, in order.

        The slots stay in this object's memory, among the `skimmed_slots` last used: markers of them are for
        this process and soon.

        Args:
            parts: the parts that one prompt needs.
            scope: tenant or user; by default the one of `stores.markers.scope`, or else the store's.

        Raises:
            ConfigError: together they have more slots than are kept.
        """
        needed = sum(part.cost for part in parts)
        if needed > self._skimmed.limit:
            raise ConfigError(
                f"a prompt needs {needed} skimmed slots and the store keeps {self._skimmed.limit}: "
                f"retrieve fewer passages, or open the store with skimmed_slots={needed} or more"
            )
        signer, scope = self._signer(), self._scope(scope)
        written = []
        for part in parts:
            name = signer.skimmed(*part.fields)
            self._skimmed.put(name, part)
            written.append(signer.write_skimmed(name, part.soft.n_slots, scope))
        return written

    def split(self, text: str, scope: str | None = None) -> list[str | Marker]:
        """Text parts and markers of a prompt, in order; a marker of another key or scope stays text."""
        return self._signer().split(text, self._scope(scope))

    def fetch(self, markers: Sequence[Marker]) -> list[SoftContext]:
        """The soft contexts that markers stand for, at the markers' ratios, in order.

        Raises:
            MissingPassageError: a passage was deleted or its text changed since the marker was written, or
                the slots of a skimmed part are no longer in memory.
            PayloadError: a record is damaged.
        """
        parts, found = self._by_marker(markers)
        base = {name: records.read_soft(id, stored) for name, (id, stored) in found.items()}
        base |= {name: part.soft for name, part in parts.items()}
        return [base[marker.passage].merge(marker.factor) for marker in markers]

    def text_of(self, markers: Sequence[Marker]) -> list[str]:
        """The passages' own texts, of a skimmed part its own, in order. Raises as `fetch` does."""
        parts, found = self._by_marker(markers)
        texts = {name: records.read_passage(id, stored).text for name, (id, stored) in found.items()}
        texts |= {name: part.text for name, part in parts.items()}
        return [texts[marker.passage] for marker in markers]

    # Inside

    def _matching(self, field: str, digest: Callable[[str, Passage], str], passages: dict[str, Passage]) -> set[str]:
        """Ids whose stored hash is the passage's. The hashes cover the id: none can match another's record."""
        return self._companion.matching(field, {id: digest(self.fingerprint, p) for id, p in passages.items()})

    def _compress(self, passages: dict[str, Passage], progress: bool) -> None:
        if not passages:
            return
        self._companion.writable()  # refused before the work, not after it
        signer, codec, items = self._signer(), self.codec, list(passages.items())
        start, size = 0, _FIRST_BATCH
        with tqdm(total=len(items), desc="compressing", unit="passage", disable=not progress) as bar:
            while start < len(items):
                batch = items[start : start + size]
                began = time.monotonic()
                softs = self.bundle.compress([passage.text for _, passage in batch], ratio=self.base_ratio)
                rows = {
                    id: records.record(
                        passage, soft, fingerprint=self.fingerprint, marker=signer.passage(passage.text), codec=codec
                    )
                    for (id, passage), soft in zip(batch, softs, strict=True)
                }
                self._companion.upsert(rows)
                bar.update(len(batch))
                start += len(batch)
                if time.monotonic() - began < _BATCH_SECONDS:
                    size = min(2 * size, WRITE_RECORDS)

    def _by_marker(self, markers: Sequence[Marker]) -> tuple[dict[str, Skimmed], dict[str, tuple[str, dict[str, Any]]]]:
        """Skimmed parts, and (id, record) of stored passages, by their names in the markers; all are there."""
        kept = {marker.passage: self._skimmed.get(marker.passage) for marker in markers if marker.skimmed}
        parts = {name: part for name, part in kept.items() if part is not None}
        if len(parts) < len(kept):
            raise MissingPassageError(
                f"the slots of {len(kept) - len(parts)} skimmed part(s) are gone: they hold for one question, in the "
                f"memory of the store that wrote their markers, which keeps the last {self._skimmed.limit}; give "
                "postprocessor and LLM the same store, retrieve again, or open it with a larger skimmed_slots"
            )
        names = [marker.passage for marker in markers if not marker.skimmed]
        stored = self._companion.read_by("marker", names)
        found = {str(record["marker"]): (id, record) for id, record in stored.items()}
        missing = [marker for marker in markers if not marker.skimmed and marker.passage not in found]
        if missing:
            raise MissingPassageError(
                f"no passage in {self._companion.connection.where} for {len(missing)} marker(s), the first "
                f"{missing[0].id!r}: it was deleted or its text changed after the prompt was made; retrieve again"
            )
        return parts, found

    def _factor(self, ratio: int) -> int:
        base = self.base_ratio
        if ratio < base or ratio % base or ratio // base > MAX_FACTOR:
            raise RatioError(f"ratio {ratio} cannot be made from the stored {base}: choose a multiple of {base}")
        if ratio != base and not self.bundle.compressor.nestable:
            raise RatioError(
                f"ratio {ratio}: slots of bundle {self.bundle.config.name!r} cannot be merged, only {base} is stored"
            )
        return ratio // base

    def _scope(self, scope: str | None) -> str:
        return scope or current_scope() or self.scope

    def _signer(self) -> MarkerCodec:
        if self._markers is None:  # not before it is needed: reading alone must not make a key file
            connection = self._companion.connection
            self._markers = MarkerCodec(find_key(connection.folder, lasting=connection.lasting), self.fingerprint)
        return self._markers


def _folder_bytes(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # SQLite's journal comes and goes
            size += path.stat().st_size if path.is_file() else 0
    return size
