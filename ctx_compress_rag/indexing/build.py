"""From texts to an index: what `ctx-compress index` does."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import chromadb
import regex
from chromadb.errors import NotFoundError
from tqdm.auto import tqdm

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import ConfigError, DataError, StoreError
from ctx_compress_rag.indexing import DEFAULT_CHUNK_TOKENS, MIN_CHUNK_TOKENS
from ctx_compress_rag.indexing.chunking import chunk
from ctx_compress_rag.indexing.index import PassageIndex, check_there, make_passage
from ctx_compress_rag.indexing.inputs import Input, as_text
from ctx_compress_rag.store import AddReport, Passage, SoftContextStore
from ctx_compress_rag.store.passage import passages_in

logger = logging.getLogger(__name__)

_CHECKED = 200
"""How many records are looked at for damage, or another key; reading meets what is damaged beside them."""
_WORDS = regex.compile(r"(?<![\p{L}\p{N}])[\p{Ll}\p{Lo}\p{M}]{2,}(?![\p{L}\p{N}])")
"""Words that are no names: with names, numbers and code, English has as many tokens as other languages."""
_ENGLISH = "the flood took the old mill on the river and its owner sold what was left to the town which built a school"
_FOREIGN = 1.4
"""Tokens per letter, of those of English, from which a language is little known. Measured with the tokenizer of
SmolLM2: 0.7 to 1.1 in English texts, 1.4 in Italian, 1.6 to 2.1 in seven other European languages, more elsewhere."""
_LETTERS = 40
"""How many letters are enough to tell."""


@dataclass(frozen=True)
class IndexReport:
    """What `update_index` did: numbers of passages, except `files`.

    Attributes:
        files: files or rows with text.
        replaced: removed because their file's text changed.
        pruned: removed because their file was deleted.
        vanished: kept although their file was deleted, since `prune` was not set.
        moved: folders that no longer exist, but half of whose files are in the one indexed now; their passages count
            as those of deleted files.
    """

    files: int
    added: int
    unchanged: int
    replaced: int
    pruned: int
    vanished: int
    moved: tuple[str, ...] = ()


class Fit:
    """Collects the ids of passages that a bundle reads badly, to warn of them once.

    They are too long for its window, or in a language that its tokenizer hardly knows.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._long: list[str] = []
        self._foreign: list[str] = []
        self._most = _FOREIGN * self._tokens(_ENGLISH) / len(_ENGLISH)

    def look(self, passage: Passage) -> None:
        if self._tokens(passage.text) > self._bundle.config.max_tokens:
            self._long.append(str(passage.id))
        words = " ".join(_WORDS.findall(passage.text))
        if len(words) >= _LETTERS and self._tokens(words) > self._most * len(words):
            self._foreign.append(str(passage.id))

    def warn(self) -> None:
        name, window = self._bundle.config.name, self._bundle.config.max_tokens
        if self._long:
            logger.warning(
                "%d passages (first: %s) are longer than the %d tokens that %s reads at a time, and are compressed in "
                "parts: shorter ones are answered better",
                *(len(self._long), self._long[0], window, name),
            )
        if self._foreign:
            logger.warning(
                "%d passages (first: %s) take far more tokens than English: the decoder of %s hardly knows their "
                "language, and will answer badly",
                *(len(self._foreign), self._foreign[0], name),
            )

    def _tokens(self, text: str) -> int:
        return len(self._bundle.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


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
    progress: bool = True,
) -> IndexReport:
    """Bring an index up to date with a folder or file; only new and changed passages are compressed.

    Texts are cut, embedded, compressed and written batch by batch, so memory holds at most one file's text and some
    hundred passages, besides the ids. After an interruption, the same call resumes with what is missing.

    The old passages of a changed file are always removed, after the new ones are stored. The passages of a deleted file
    are removed only with `prune`, and only if they came from this folder; those of a file that exists but cannot be
    read stay. A row of JSONL counts as a file. Passages that the bundle reads badly are warned of.

    Args:
        index: the index.
        given: what to index, from `open_input`.
        chunk_tokens: maximum decoder tokens of a passage; None takes 256, or the bundle's window if that is less.
        prune: remove the passages of deleted files, and those of folders that this one was before it was renamed.
        repair: first read every record, and compress those that are damaged again.
        progress: show a progress bar, in bytes of the input.
    """
    if chunk_tokens is None:
        chunk_tokens = min(DEFAULT_CHUNK_TOKENS, index.bundle.config.max_tokens)
    if chunk_tokens < MIN_CHUNK_TOKENS:
        raise ConfigError(f"passages of {chunk_tokens} tokens are too short: give {MIN_CHUNK_TOKENS} or more")
    repaired = index.store.discard_damaged(other_keys=False, sample=None if repair else _CHECKED)
    if repaired:
        logger.warning("compressing %d damaged records again, %s first", len(repaired), repaired[0])
    given.costly = index.folder and index.folder / "costly_documents.json"
    cut = _Cut(given, index, chunk_tokens)
    added = unchanged = 0
    with tqdm(total=given.bytes, desc="indexing", unit="B", unit_scale=True, disable=not progress) as bar:
        bar.set_postfix_str("0 passages")
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
    """Compress the texts of an app's own Chroma collection into soft contexts beside it.

    Soft contexts of deleted passages stay; `SoftContextStore.sync` removes them, too. Raises StoreError if there is no
    such folder or collection, or it has no texts.
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
