"""From texts to an index: what `ctx-compress index` does."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import chromadb
from chromadb.errors import NotFoundError
from tqdm.auto import tqdm

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import DataError, StoreError
from ctx_compress_rag.indexing import DEFAULT_CHUNK_TOKENS
from ctx_compress_rag.indexing.chunking import chunk
from ctx_compress_rag.indexing.fit import Fit
from ctx_compress_rag.indexing.index import PassageIndex, check_there, make_passage
from ctx_compress_rag.indexing.inputs import Input, as_text
from ctx_compress_rag.store import AddReport, Passage, SoftContextStore
from ctx_compress_rag.store.passage import passages_in

logger = logging.getLogger(__name__)

_CHECKED = 200
"""How many records are looked at for damage, or another key; reading meets what is damaged beside them."""


@dataclass(frozen=True)
class IndexReport:
    """What `update_index` did: numbers of passages, but for the first and the last."""

    files: int  # files or rows with text
    added: int
    unchanged: int
    replaced: int  # removed because their file's text changed
    pruned: int  # removed because their file was deleted
    vanished: int  # kept although their file was deleted, since `prune` was not set
    # Folders that no longer exist, but half of whose files are in the one indexed now: theirs count as deleted files'.
    moved: tuple[str, ...] = ()


class _Cut:
    """Iterates lazily over the passages of an input, and keeps their ids and sources, but no texts."""

    def __init__(self, given: Input, index: PassageIndex, chunk_tokens: int) -> None:
        self.root = as_text(str(given.path.resolve()))
        roots = index.roots()
        self.stored = roots.get(self.root, {})
        self.elsewhere = {root: sources for root, sources in roots.items() if not os.path.exists(root)}
        self.ids: set[str] = set()
        self.sources: set[str] = set()  # only those of passages stored before
        self.files = 0
        self.bytes = 0
        self.fit = Fit(index.bundle)
        self._known = set(self.stored.values()).union(*(sources.values() for sources in self.elsewhere.values()))
        self._given, self._tokenizer, self._chunk_tokens = given, index.bundle.tokenizer, chunk_tokens

    def __iter__(self) -> Iterator[Passage]:
        for text in self._given.texts():
            end = self.bytes + text.bytes
            if text.source in self._known:
                self.sources.add(text.source)
            self.files += bool(text.text.strip())
            for part in chunk(text.text, self._tokenizer, self._chunk_tokens, markdown=text.markdown):
                self.bytes = min(end, self.bytes + len(part.encode()))
                passage = make_passage(part, text.source, self.root)
                if passage.id not in self.ids:
                    self.ids.add(str(passage.id))
                    if passage.id not in self.stored:
                        self.fit.look(passage)
                    yield passage
            self.bytes = end

    def moved(self) -> dict[str, dict[str, str]]:
        """The folders that this one seems to have been, with the sources of their passages."""
        return {
            root: sources
            for root, sources in self.elsewhere.items()
            if 2 * len(self.sources.intersection(sources.values())) >= len(set(sources.values()))
        }


def update_index(
    index: PassageIndex,
    given: Input,
    *,
    chunk_tokens: int | None = None,
    prune: bool = False,
    repair: bool = False,
) -> IndexReport:
    """Bring an index up to date with a folder or file; only new and changed passages are compressed.

    Texts are cut, embedded, compressed and written batch by batch, so memory holds at most one file's text and some
    hundred passages, besides the ids. After an interruption, the same call resumes with what is missing.

    The old passages of a changed file are always removed, after the new ones are stored. The passages of a deleted file
    are removed only with `prune`, and only if they came from this folder; those of a file that exists but cannot be
    read stay. A row of JSONL counts as a file. Passages that the bundle reads badly are warned of.

    Args:
        chunk_tokens: maximum decoder tokens of a passage; None takes 256, or the bundle's window if that is less.
        prune: remove the passages of deleted files, and those of folders that this one was before it was renamed.
        repair: first read every record, and compress those that are damaged again.
    """
    if chunk_tokens is None:
        chunk_tokens = min(DEFAULT_CHUNK_TOKENS, index.bundle.config.max_tokens)
    repaired = index.store.discard_damaged(other_keys=False, sample=None if repair else _CHECKED)
    if repaired:
        logger.warning("compressing %d damaged records again, %s first", len(repaired), repaired[0])
    given.costly = index.folder and index.folder / "costly_documents.json"
    cut = _Cut(given, index, chunk_tokens)
    added = unchanged = 0
    with tqdm(total=given.bytes, desc="indexing", unit="B", unit_scale=True) as bar:
        for part in index.add(cut):
            added, unchanged = added + part.added, unchanged + part.unchanged
            bar.set_postfix_str(f"{added + unchanged} passages", refresh=False)
            bar.update(cut.bytes - bar.n)
        bar.update(cut.bytes - bar.n)
    if not cut.files:
        raise DataError(f"nothing to index in {str(given.path)!r}: it holds no text")
    stale = [id for id, source in cut.stored.items() if id not in cut.ids and source in cut.sources]
    gone = [id for id, source in cut.stored.items() if source not in cut.sources and not given.cannot_read(source)]
    moved = cut.moved()
    gone += [id for sources in moved.values() for id in sources]
    index.remove(stale + gone if prune else stale)
    cut.fit.warn()
    return IndexReport(
        files=cut.files,
        added=added,
        unchanged=unchanged,
        replaced=len(stale),
        pruned=len(gone) if prune else 0,
        vanished=0 if prune else len(gone),
        moved=tuple(moved),
    )


def compress_collection(
    folder: str | Path,
    name: str,
    bundle: str,
    codec: str | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> AddReport:
    """Compress the texts of an app's own Chroma collection into soft contexts beside it; StoreError if there is none.

    Soft contexts of deleted passages stay; `SoftContextStore.sync` removes them, too.
    """
    check_there(folder)
    client = chromadb.PersistentClient(str(folder))
    try:
        collection = client.get_collection(name, embedding_function=None)
    except (NotFoundError, UnicodeEncodeError):  # the latter for a name that is not UTF-8
        names = ", ".join(sorted(each.name for each in client.list_collections()))
        raise StoreError(f"no collection {name!r} in {str(folder)!r}: there are {names or 'none'}") from None
    loaded = Bundle.from_pretrained(bundle, device=device, dtype=dtype)
    passages = list(passages_in(collection))
    with SoftContextStore(collection, loaded, codec=codec) as store:
        done = store.add(passages)
    if done.added or done.updated:
        fit = Fit(loaded)
        for passage in passages:
            fit.look(passage)
        fit.warn()
    return done
