"""The store of soft contexts, in a Chroma collection beside the app's own."""

import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from os import PathLike
from typing import Never, Self

import chromadb
from tqdm.auto import tqdm

from ctx_compress_rag.bundle.exported import AnyBundle
from ctx_compress_rag.errors import ConfigError, MissingPassageError, StoreError, UnreadableMarkerError
from ctx_compress_rag.methods.base.rendering import TransientPart
from ctx_compress_rag.process_bound import ProcessBound
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store.key import StoreKey
from ctx_compress_rag.store.marker import DEFAULT_SCOPE, Marker, OnUnreadable, check_scope, current_scope
from ctx_compress_rag.store.passage import (
    AddReport,
    Passage,
    StoredPassage,
    StoreInfo,
    SyncReport,
    checked_passage_ids,
    collection_passages,
    listed_passages,
    passage_batches,
    passage_content_id,
    unique_passages,
)
from ctx_compress_rag.store.place import (
    DEFAULT_TIMEOUT,
    READ_TIMEOUT,
    Location,
    StorePlace,
    companion_collection,
    connect_store,
)
from ctx_compress_rag.store.record import (
    FoundRecord,
    damaged_record,
    owned_by_scope,
    passage_id,
    readable_scopes,
    record_id,
)
from ctx_compress_rag.store.records import Records, TransientParts, summarize_store
from ctx_compress_rag.store.threads import caller_gone, shielded_from_interrupts
from ctx_compress_rag.strict import as_int, as_seconds, check_known_options

logger = logging.getLogger(__name__)


class SoftContextStore(ProcessBound):
    """The soft contexts of one bundle, by passage id, in Chroma.

    They are kept in a collection `<collection>-ctx`, one record per passage. Threads and processes may share a folder,
    because each read or write holds the folder's locks for milliseconds. After Ctrl-C, no lock stays, a write in
    progress is finished, and no other begins. Several machines may share a Chroma server; a folder that a server uses
    must be reached through the server. A store does not survive `fork`, so open it in the child process.

    ```python
    with SoftContextStore("./chroma", Bundle.from_pretrained("smollm2-135m")) as store:
        store.add(["The harbor was built by Oda Brink.", "Tarin Holt keeps bees."], ids=["harbor", "bees"])
        prompt = f"Answer from this: {store.marker('harbor', ratio=4)}"
    ```

    Args:
        location: a folder, a Chroma client (embedded or HttpClient), or the app's own collection, beside which the
            soft contexts are put.
        bundle: the bundle that compresses passages, or an exported one, which reads them; a store made with another
            bundle is refused.
        collection: name of the app's collection (it need not exist), to which `-ctx` is added for the soft contexts;
            ignored if `location` is a collection.
        codec: "int8" or "fp16"; None takes int8 in a new store. An existing store keeps its own, and refuses another.
        ratio: source tokens per slot; None takes the bundle's base ratio in a new store. An existing store keeps its
            own, and refuses another. Methods that merge slots (mean pooling) can read coarser ratios from it.
        key: secret that signs markers and records, at least 16 bytes; None takes CTX_COMPRESS_KEY or the folder's file.
        scope: tenant or user of calls that name none, outside of `ctx_compress_rag.scope`.
        lock_timeout: seconds that a write waits for other writes, 0 or more.
        read_timeout: seconds that a read waits for a write in progress, and as many for Chroma's answer, 0.1 or more.

    Raises:
        FingerprintMismatchError: the store was made with another bundle.
        StoreError: the store cannot be opened, or has another format, codec or ratio than expected.
        StoreWriteError: there is no store yet, and this user may not create one there.
        RatioError: the bundle cannot make this ratio.
        ConfigError: an argument is unknown or has an impossible value.
    """

    def __init__(
        self,
        location: Location | StorePlace,
        bundle: AnyBundle,
        *,
        collection: str = "passages",
        codec: str | None = None,
        ratio: int | None = None,
        key: bytes | None = None,
        scope: str = DEFAULT_SCOPE,
        lock_timeout: float = DEFAULT_TIMEOUT,
        read_timeout: float = READ_TIMEOUT,
        **unknown: Never,
    ) -> None:
        check_known_options("SoftContextStore", unknown, SoftContextStore.__init__.__kwdefaults__ or ())
        if isinstance(bundle, str | PathLike):
            raise ConfigError(f"bundle={bundle!r} is a name: give Bundle.from_pretrained({str(bundle)!r})")
        self.bundle = bundle
        self.scope = check_scope(scope)
        if ratio is not None:
            ratio = as_int("ratio", ratio)
            bundle.check_ratio(ratio)
        # Opening takes time.
        timeouts = as_seconds("lock_timeout", lock_timeout), as_seconds("read_timeout", read_timeout, least=0.1)
        name, place = companion_collection(location, collection), connect_store(location)
        self._records = Records(place, name, bundle, StoreKey(key, place), codec, ratio, *timeouts)
        self._writing = threading.Lock()
        self._transient = TransientParts()
        self._said_empty = False

    # Writing

    @shielded_from_interrupts
    def add(
        self,
        documents: Iterable[object] | chromadb.Collection,
        ids: Sequence[str] | None = None,
        progress: bool = True,
        scope: str | None = None,
    ) -> AddReport:
        """Compress and store documents that are new or whose text changed, and update metadata that changed.

        Batches are stored one by one: those that the progress bar counts are on disk. After an interruption, the same
        call resumes where it stopped. If one document is invalid, nothing is written.

        The same call on an empty store stores the same bits, on one machine with as many threads. Passages added in
        other groups, or after an interruption, are encoded in other batches, and differ by rounding.

        Args:
            documents: strings, Passages, LangChain Documents or LlamaIndex nodes; or a Chroma collection.
            ids: one per document; None takes the document's own id or, without one, a hash of its text.
            progress: whether to show a progress bar.
            scope: tenant or user that owns the passages; None: that of `ctx_compress_rag.scope`, else the store's.
                Passages of the scope "default" can be read in every scope, those of another scope only in that scope.

        Raises:
            ConfigError: a text is blank or not a str, or an id is empty or given twice.
            PayloadError: a slot is NaN or infinite; the batch with its passage is not stored.
            StoreLockedError: other threads or processes held the folder's locks for longer than `lock_timeout`.
            StoreWriteError: the folder is read-only, or its disk is full.
        """
        scope = self._scope(scope)
        checked = unique_passages(listed_passages(documents, ids))
        with self._writing:
            changes = self._records.compare({record_id(id, scope): each for id, each in checked.items()})
            self._records.relabel(changes.labels)
            self._compress(changes.texts, scope, progress)
        return AddReport(changes.new, len(changes.texts) + len(changes.labels) - changes.new, changes.unchanged)

    def sync(self, collection: chromadb.Collection, progress: bool = True, scope: str | None = None) -> SyncReport:
        """Add, update and delete passages of the scope, so that they match the app's collection.

        Records without a text are skipped. `progress`, `scope` and the errors are those of `add`.
        """
        before = self.ids(scope)  # before reading, so that passages that others store meanwhile stay
        passages = list(collection_passages(collection))
        report = self.add(passages, progress=progress, scope=scope)
        gone = sorted(set(before) - {str(passage.id) for passage in passages})
        return SyncReport(report.added, report.updated, report.unchanged, self.delete(gone, scope))

    @shielded_from_interrupts
    def ensure(self, texts: Sequence[str], ids: Sequence[str] | None = None, scope: str | None = None) -> list[str]:
        """Compress and store the texts that are not stored, and return each text's id in the store, in order.

        This is `add` for a retriever's results. An id may come twice. Metadata of an unchanged text stay as stored, and
        texts of the scope "default" count as stored. If nothing is missing, no write lock is taken. If an id comes with
        another text than the stored one, such as an excerpt, that text is stored beside it, under its hash.
        """
        scope, passages = self._scope(scope), listed_passages(texts, ids)
        places = self._places(passages, scope)
        if None in places:
            with self._writing:
                places = self._places(passages, scope)  # again: another thread may have stored the same passages
                lacking = {number: each for number, each in enumerate(passages) if places[number] is None}
                named = {str(each.id) for each in lacking.values()}
                taken = [record_id(id, place) for id in named for place in readable_scopes(scope)]
                # The text that each id stands for: one that is stored under it, else the first of this call.
                own: dict[str, str | None] = {passage_id(each): None for each in self._records.existing(taken)}
                missing: dict[str, Passage] = {}
                for number, passage in lacking.items():
                    is_own = own.setdefault(str(passage.id), passage.text) == passage.text
                    places[number] = id = str(passage.id) if is_own else passage_content_id(passage.text)
                    missing[record_id(id, scope)] = Passage(passage.text, id)
                self._records.prepare()
                self._compress(missing, scope, progress=False)
        return list(map(str, places))

    def delete(self, ids: Sequence[str], scope: str | None = None) -> int:
        """Delete the scope's own passages with these ids, and return how many. Ids that are not stored are skipped."""
        scope = self._scope(scope)
        return self._delete([record_id(id, scope) for id in checked_passage_ids(ids)])

    def damaged(self) -> list[str]:
        """Return the ids, in all scopes, of passages that are damaged or signed with another key; read all records."""
        return [passage_id(id) for id in self._records.unreadable()]

    def discard_damaged(self, *, other_keys: bool = True, sample: int | None = None) -> list[str]:
        """Delete the passages that `damaged` finds, and return their ids. The next `add` compresses them again.

        Args:
            other_keys: whether to delete intact records that are signed with another key, too; if False, they raise
                StoreError before anything is deleted.
            sample: number of records to check, drawn at random; None, or a larger number than is stored, checks all.
        """
        unreadable = self._records.unreadable(sample)
        if not other_keys and (intact := [passage_id(id) for id, is_intact in unreadable.items() if is_intact]):
            raise StoreError(
                f"{len(intact)} records (first: {intact[0]!r}) are intact but not signed with the key in use: set "
                "CTX_COMPRESS_KEY to the key that signed them; if it is lost, SoftContextStore.discard_damaged() "
                "deletes them, and adding the passages again compresses them"
            )
        self._delete(list(unreadable))
        return [passage_id(id) for id in unreadable]

    def close(self) -> None:
        """Close the store, which cannot be used afterwards. Closing it again has no effect."""
        self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Reading

    def get(
        self, ids: Sequence[str], scope: str | None = None, texts: Sequence[str] | None = None
    ) -> list[SoftContext | None]:
        """Return the soft contexts at the base ratio, in the order of the ids, None for an id that is not stored.

        Args:
            ids: passage ids.
            scope: tenant or user that reads; None takes the scope of `ctx_compress_rag.scope`, otherwise the store's.
            texts: one per id, so that a record with another text counts as not stored; None accepts any text.

        Raises PayloadError, with the passage's id, if a record is damaged or signed with another key.
        """
        return [None if found is None else found.soft for found in self._find(ids, scope, texts)]

    def get_passages(
        self, ids: Sequence[str], scope: str | None = None, texts: Sequence[str] | None = None
    ) -> list[StoredPassage | None]:
        """Return text, metadata and sizes in the order of the ids, None if not stored. Arguments are those of `get`."""
        return [None if found is None else found.passage for found in self._find(ids, scope, texts)]

    def stored_ids(
        self, texts: Sequence[str], ids: Sequence[str] | None = None, scope: str | None = None
    ) -> list[str | None]:
        """Return each text's id in the store, from `ids` or a hash of the text (see `ensure`), None if not stored."""
        return self._places(listed_passages(texts, ids), self._scope(scope))

    def ids(self, scope: str | None = None) -> list[str]:
        """Return the ids of the scope's own passages, without those of the default scope that it can read, too."""
        scope = self._scope(scope)
        return [passage_id(id) for id in self._records.ids() if owned_by_scope(id, scope)]

    def __len__(self) -> int:
        """Return the number of passages in all scopes."""
        return self._records.count()

    def __repr__(self) -> str:
        try:
            held = f"{len(self):,} passages"
        except StoreError:
            held = "cannot be read"
        bundle, where, codec = self.bundle.config.name, self._records.place.where, self._records.codec
        return f"SoftContextStore({where!r}, bundle {bundle!r}, ratio {self.base_ratio}, {codec}: {held})"

    def __bool__(self) -> bool:
        """Return True even for an empty store, because `if store` asks whether there is a store."""
        return True

    def warn_if_empty(self) -> None:
        """Log once, if nothing is stored, where that is: a passage was not found, and path or name may be wrong."""
        if not self._said_empty and not len(self):
            self._said_empty = True
            try:
                others = ", ".join(self._records.collection_names()) or "none"
            except StoreError:  # a server may forbid to list them, which must not hide the caller's own error
                others = "unknown"
            logger.warning(
                "nothing is stored yet in the collection %r of %s: if you expected passages, check both; there are: %s",
                *(self._records.name, self._records.place.where, others),
            )

    def info(self) -> StoreInfo:
        """Return the contents and the size of the store, with all its scopes. Reads every record."""
        return summarize_store(self._records, self._records.about)

    @property
    def base_ratio(self) -> int:
        """Source tokens per slot of the stored soft contexts."""
        return int(self._records.about["base_ratio"])

    # Markers

    def marker(self, id: str, ratio: int, scope: str | None = None) -> str:
        """Return the marker that stands for a passage in a prompt; arguments and errors are those of `markers`."""
        return self.markers([id], ratio, scope)[0]

    def markers(
        self,
        ids: Sequence[str],
        ratio: int,
        scope: str | None = None,
        texts: Sequence[str] | None = None,
    ) -> list[str]:
        """Return the markers that stand for passages in a prompt, in the order of the ids.

        `ratio` is source tokens per slot, a multiple of the store's base ratio; other arguments are those of `get`.

        Raises:
            ConfigError: the bundle's method (RAM) reads passages only for a question.
            RatioError: the ratio cannot be made from the base ratio.
            MissingPassageError: an id is not stored, or is stored with another text.
            PayloadError: a record is damaged or signed with another key; the message names the passage.
        """
        factor = self.bundle.compressor.merge_factor(as_int("ratio", ratio), self.base_ratio)
        passages = self.get_passages(ids := checked_passage_ids(ids), scope, texts)
        if missing := [id for id, passage in zip(ids, passages, strict=True) if passage is None]:
            self.warn_if_empty()
            raise MissingPassageError(f"passage {missing[0]!r} is not stored ({len(missing)} missing): add it first")
        return [self.marker_of(passage, factor, scope) for passage in passages if passage is not None]

    def marker_of(
        self, passage: StoredPassage, factor: int | None, scope: str | None = None, shown: int | None = None
    ) -> str:
        """Return the marker of a passage that `get_passages` returned, with the scope and the errors of `markers`.

        Args:
            passage: the passage.
            factor: how many stored slots are merged into one; None for no slots, as only its text is shown.
            scope: tenant or user.
            shown: characters of its text before the marker and a space; None if the prompt has no text beside slots.
        """
        if not passage.marker:
            raise damaged_record(record_id(passage.id, DEFAULT_SCOPE), "its payload was changed")
        merged = min(factor or 1, passage.n_slots)  # all larger factors mean one slot
        slots = -(-passage.n_slots // merged) if factor else 0
        return self._records.signer.write(passage.marker, merged, slots, self._scope(scope), shown)

    def transient_markers(self, parts: Sequence[TransientPart], scope: str | None = None) -> list[str]:
        """Return a marker of each part, and keep the slots in memory. Raise ConfigError for more than 16,384 slots."""
        signer, scope = self._records.signer, self._scope(scope)
        written = [signer.write(signer.transient(*part.key), 1, part.soft.n_slots, scope) for part in parts]
        self._transient.keep(dict(zip(written, parts, strict=True)))
        return written

    def split(self, text: str, scope: str | None = None, on_unreadable: OnUnreadable = "text") -> list[str | Marker]:
        """Return the text parts and the markers of a prompt, in order.

        A marker of another key or scope stays text, with a warning; for "error", UnreadableMarkerError is raised.
        """
        try:
            return self._records.signer.split(text, self._scope(scope), on_unreadable)
        except UnreadableMarkerError:
            with suppress(StoreError):  # of a store that cannot be reached, which must not hide this error
                self.warn_if_empty()
            raise

    def read(self, markers: Sequence[Marker]) -> list[FoundRecord | TransientPart]:
        """Return what markers stand for, in order, read once: its text, and its slots at the marker's ratio.

        Raises MissingPassageError if a passage was deleted or its text changed after the marker was written, and
        PayloadError if a record was changed or signed with another key. Damaged slots or texts raise when asked for.
        """
        kept, rest = self._transient.split(markers)
        found: dict[Marker, FoundRecord | TransientPart] = {**kept, **self._records.by_marker(rest)}
        return [found[marker] for marker in markers]

    # Inside

    @shielded_from_interrupts
    def _delete(self, records: Sequence[str]) -> int:
        with self._writing:
            present = self._records.existing(records)
            self._records.delete(present)
        return len(present)

    def _compress(self, passages: dict[str, Passage], scope: str, progress: bool) -> None:
        with tqdm(total=len(passages), desc="compressing", unit="passage", disable=not (progress and passages)) as bar:
            # Batches of similar length have little padding; the longest first, so that memory runs out soon or never.
            longest = sorted(passages.items(), key=lambda item: -len(item[1].text))
            for batch in passage_batches(dict(longest)):
                if caller_gone():
                    return
                softs = self.bundle.compress([passage.text for passage in batch.values()], ratio=self.base_ratio)
                self._records.write(batch, softs, scope)
                bar.update(len(batch))

    def _find(self, ids: Sequence[str], scope: str | None, texts: Sequence[str] | None) -> Sequence[FoundRecord | None]:
        return self._records.find(checked_passage_ids(ids), self._scope(scope), texts)

    def _places(self, passages: Sequence[Passage], scope: str) -> list[str | None]:
        """Return the id under which each passage's text is stored, its own or the text's hash; None if neither is."""
        held = self._records.has_passages(passages, scope)
        others = [
            Passage(each.text, passage_content_id(each.text))
            for each, there in zip(passages, held, strict=True)
            if not there
        ]
        beside = zip(others, self._records.has_passages(others, scope), strict=True)
        found = iter([each.id if there else None for each, there in beside])
        return [each.id if there else next(found) for each, there in zip(passages, held, strict=True)]

    def _scope(self, scope: str | None) -> str:
        return current_scope() or self.scope if scope is None else check_scope(scope)
