"""Build or update an index from texts, as `ctx-compress index` does."""

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
from ctx_compress_rag.indexing.chunking import chunk_text
from ctx_compress_rag.indexing.fit import IndexFit
from ctx_compress_rag.indexing.index import PassageIndex, check_index_exists, make_index_passage
from ctx_compress_rag.indexing.inputs import IndexInput, path_text
from ctx_compress_rag.store import AddReport, Passage, SoftContextStore
from ctx_compress_rag.store.passage import collection_passages

logger = logging.getLogger(__name__)

_CHECKED = 200
"""How many random records are checked for damage or another key. Damage of others shows when they are read."""


@dataclass(frozen=True)
class IndexReport:
    """What `update_index` did. The fields from `added` to `vanished` are numbers of passages."""

    files: int  # files or rows with text
    added: int
    unchanged: int
    replaced: int  # removed because the text of their file changed
    pruned: int  # removed because their file was deleted
    vanished: int  # kept although their file was deleted, since `prune` was not set
    # Folders that no longer exist, with half of their files in the indexed folder: their passages count as deleted.
    moved: tuple[str, ...] = ()


class _Cut:
    """The passages of an input, cut one by one while it is iterated over. Their ids and sources are kept, no texts."""

    def __init__(self, given: IndexInput, index: PassageIndex, chunk_tokens: int) -> None:
        self.root = path_text(str(given.path.resolve()))
        roots = index.roots()
        self.stored = roots.pop(self.root, {})  # which is no path if its name is not UTF-8
        self.elsewhere = {root: sources for root, sources in roots.items() if not os.path.exists(root)}
        self.ids: set[str] = set()
        self.sources: set[str] = set()  # only those of passages stored before
        self.files = 0
        self.bytes = 0
        self.fit = IndexFit(index.bundle)
        self._known = set(self.stored.values()).union(*(sources.values() for sources in self.elsewhere.values()))
        self._given, self._tokenizer, self._chunk_tokens = given, index.bundle.tokenizer, chunk_tokens

    def __iter__(self) -> Iterator[Passage]:
        for text in self._given.texts():
            end = self.bytes + text.bytes
            if text.source in self._known:
                self.sources.add(text.source)
            self.files += bool(text.text.strip())
            for part in chunk_text(text.text, self._tokenizer, self._chunk_tokens, markdown=text.markdown):
                self.bytes = min(end, self.bytes + len(part.encode()))
                passage = make_index_passage(part, text.source, self.root, text.metadata)
                if passage.id not in self.ids:
                    self.ids.add(str(passage.id))
                    if passage.id not in self.stored:
                        self.fit.look(passage)
                    yield passage
            self.bytes = end

    def moved(self) -> dict[str, dict[str, str]]:
        """Return the earlier names that this folder seems to have had, each with its passages' sources by id."""
        return {
            root: sources
            for root, sources in self.elsewhere.items()
            if 2 * len(self.sources.intersection(sources.values())) >= len(set(sources.values()))
        }


def update_index(
    index: PassageIndex,
    given: IndexInput,
    *,
    chunk_tokens: int | None = None,
    prune: bool = False,
    repair: bool = False,
) -> IndexReport:
    """Update an index from a folder or file, and return what was done. Only new and changed passages are compressed.

    Texts are cut, embedded, compressed and written batch by batch, so memory holds at most one file's text and some
    hundred passages, besides the ids. After an interruption, the same call resumes. Raises DataError without a text.

    The old passages of a changed file are always removed, after the new ones are stored. The passages of a deleted file
    are removed only with `prune`, and only if they came from this folder. Passages of a file that exists but cannot be
    read stay. A row of JSONL counts as a file. A warning tells of passages that the bundle reads badly.

    Args:
        chunk_tokens: maximum decoder tokens of a passage; None takes 256, or the bundle's window if that is less.
        prune: whether to remove the passages of deleted files, also those of the folder's earlier name, or keep them.
        repair: whether to check every record for damage, not 200 random ones. Damaged ones are compressed again.
    """
    if chunk_tokens is None:
        chunk_tokens = min(DEFAULT_CHUNK_TOKENS, index.bundle.config.window)
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
    """Compress the texts of the collection `name` in the app's Chroma folder into soft contexts beside it.

    Soft contexts of texts that the app deleted stay (`SoftContextStore.sync` removes them). Raises StoreError if there
    is no such collection. Other arguments are those of `Bundle.from_pretrained` and `SoftContextStore`.
    """
    check_index_exists(folder)
    client = chromadb.PersistentClient(str(folder))
    try:
        collection = client.get_collection(name, embedding_function=None)
    except (NotFoundError, UnicodeEncodeError):  # the latter for a name that is not UTF-8
        names = ", ".join(sorted(each.name for each in client.list_collections()))
        raise StoreError(f"no collection {name!r} in {str(folder)!r}: there are {names or 'none'}") from None
    loaded = Bundle.from_pretrained(bundle, device=device, dtype=dtype)
    passages = list(collection_passages(collection))
    with SoftContextStore(collection, loaded, codec=codec) as store:
        done = store.add(passages)
    if done.added or done.updated:
        fit = IndexFit(loaded)
        for passage in passages:
            fit.look(passage)
        fit.warn()
    return done
