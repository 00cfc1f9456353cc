"""The index that the command line keeps in a Chroma folder, a collection to retrieve from and its soft contexts.

The collection `passages` holds texts, metadata and a sentence encoder's vectors (cosine), as any RAG app's does, so
langchain-chroma and LlamaIndex can open it. The soft contexts are beside it (`SoftContextStore`), under the same ids.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, Self

from ctx_compress_rag.bundle import SHIPPED
from ctx_compress_rag.bundle.exported import AnyBundle
from ctx_compress_rag.errors import ConfigError, StoreError, needs
from ctx_compress_rag.indexing import DEFAULT_BUNDLE
from ctx_compress_rag.models.sentence_embedding import PACKAGED, embed_passages, embed_questions, load_embedder
from ctx_compress_rag.store import AddReport, Passage, SoftContextStore, StoreInfo
from ctx_compress_rag.store.chroma_internals import has_chroma_database
from ctx_compress_rag.store.collection import ChromaCollection, Row, chroma_pages
from ctx_compress_rag.store.marker import DEFAULT_SCOPE
from ctx_compress_rag.store.passage import passage_batches
from ctx_compress_rag.store.place import StorePlace, check_store_folder_name, connect_store
from ctx_compress_rag.store.record import owned_by_scope, passage_id, record_id
from ctx_compress_rag.store.records import summarize_store

_WORD = r"\w+"
_LEADS = 3  # texts that words alone bring to the top, at most
_FAR = 2.0
"""How many times the score of the next text the last of them has. Measured: docs/command_line.md."""


class WordSearch:
    """An index of the words of distinct texts, without the commonest English ones."""

    def __init__(self, texts: Iterable[str]) -> None:
        with needs("sentences"):
            import bm25s
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # its own is DEBUG, whatever the app's is
        self._texts = list(texts)
        words = self._words(self._texts)
        self._index = bm25s.BM25() if words.vocab else None  # which divides by the number of words
        if self._index:
            self._index.index(words, show_progress=False)

    def leading(self, question: str) -> list[str]:
        """Return the at most three texts whose scores are far above those of all others, the best first, or none."""
        if not self._index:
            return []
        most = min(_LEADS + 1, len(self._texts))
        places, scores = self._index.retrieve(self._words([question]), k=most, show_progress=False)
        found = [*scores[0].tolist(), 0.0]
        for number in range(min(_LEADS, most)):
            if found[number] > 0 and found[number] >= _FAR * found[number + 1]:
                return [self._texts[place] for place in places[0][: number + 1]]
        return []

    @staticmethod
    def _words(texts: list[str]) -> Any:
        from bm25s import tokenize

        return tokenize(texts, token_pattern=_WORD, stopwords="en", show_progress=False)


logger = logging.getLogger(__name__)

COLLECTION = "passages"
BUNDLE_KEY = "ctx_bundle"
EMBEDDER_KEY = "ctx_embedder"
_COSINE: Any = {"hnsw": {"space": "cosine"}}
_LOOKED_UP = 250  # how many passages are looked up together: as many as Chroma answers in one query
_FIRST = 8  # how many passages are looked up first, so that progress shows early


def make_index_passage(text: str, source: str, root: str, metadata: Mapping[str, Any] | None = None) -> Passage:
    """Return a passage whose id depends on `root` (the indexed folder), `source` (the file), text and metadata."""
    parts = (root, source, text, *([json.dumps(metadata)] if metadata else []))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return Passage(text, f"{source}#{digest}", {**(metadata or {}), "source": source, "root": root})


@dataclass(frozen=True)
class IndexHit:
    """A retrieved passage. `similarity` is the cosine (-1 to 1) of its vector and the question's.

    `source` names its file, and with ", " between them all files with the same text.
    """

    id: str
    text: str
    source: str
    similarity: float


class PassageCollection(ChromaCollection):
    def check(self, metadata: Row) -> None:
        if BUNDLE_KEY not in metadata:
            raise StoreError(
                f"the collection {self.name!r} in {self.place.where} was not made by `ctx-compress index`: choose "
                "another folder, or put soft contexts beside it with SoftContextStore"
            )

    def made_with(self) -> tuple[str | None, str]:
        """Return the names or paths of the index's bundle (None if there is no index) and embedder."""
        about = self.metadata()
        return about.get(BUNDLE_KEY), str(about.get(EMBEDDER_KEY, PACKAGED))

    def roots(self) -> dict[str, dict[str, str]]:
        """Return, for each folder that was indexed, the source (file) of each passage, by passage id."""
        found: dict[str, dict[str, str]] = {}
        for id, row in self.rows(self.ids()).items():
            if "source" in row and "root" in row:
                found.setdefault(str(row["root"]), {})[id] = str(row["source"])
        return found


class PassageIndex:
    """An index of passages to retrieve, and of their soft contexts. Open one with `open_index`.

    `interrupted` is True if a process was killed while it wrote to the folder, until `mend` is called.
    """

    def __init__(
        self,
        place: StorePlace,
        bundle: AnyBundle,
        bundle_name: str,
        codec: str | None,
        embedder: str,
    ) -> None:
        self.folder = place.folder
        self.bundle = bundle
        self.embedder = embedder
        self.store = SoftContextStore(place, bundle, collection=COLLECTION, codec=codec)
        about = {BUNDLE_KEY: bundle_name, EMBEDDER_KEY: embedder}
        self._passages = PassageCollection(place, COLLECTION, _COSINE, about)
        self.interrupted = self._passages.interrupted()
        self._read: tuple[bytes, dict[str, dict[str, str]], WordSearch] | None = None

    def add(self, passages: Iterable[Passage]) -> Iterator[AddReport]:
        """Store missing passages, and yield the numbers of added and unchanged ones, each batch once it is on disk.

        At most 250 passages are in memory at a time. After an interruption, the same call resumes. A passage that then
        has only a vector for retrieval is compressed when it is added again, or retrieved.
        """
        stream, sizes = iter(passages), chain([_FIRST], repeat(_LOOKED_UP))
        while group := list(islice(stream, next(sizes))):
            missing = {str(passage.id): passage for passage in self._missing(group)}
            yield AddReport(0, 0, len(group) - len(missing))
            for batch in passage_batches(missing):
                texts = [passage.text for passage in batch.values()]
                vectors: Any = embed_passages(texts, self.embedder)
                metadatas = [dict(passage.metadata) for passage in batch.values()]
                self._passages.upsert(list(batch), vectors, metadatas, texts)
                self.store.add(batch.values(), progress=False)
                yield AddReport(len(batch), 0, 0)

    def _missing(self, passages: Sequence[Passage]) -> list[Passage]:
        ids = [str(passage.id) for passage in passages]
        compressed = self.store.stored_ids([passage.text for passage in passages], ids)
        found = set(self._passages.existing(ids))
        return [p for p, id, own in zip(passages, ids, compressed, strict=True) if own != id or id not in found]

    def mend(self) -> list[str]:
        """Put back vectors that Chroma lost (see `ChromaCollection.unsearchable`), and return their passages' ids."""
        restored: list[str] = []
        for ids in chroma_pages(self._passages.unsearchable()):
            found = {id: (str(text), row) for id, (text, row) in self._passages.texts(ids).items() if text}
            if found:
                texts = [text for text, _ in found.values()]
                vectors: Any = embed_passages(texts, self.embedder)
                self._passages.upsert(list(found), vectors, [row for _, row in found.values()], texts)
                restored += found
        if restored:
            logger.warning("put back %d passages that search could not find, %s first", len(restored), restored[0])
        self._passages.place.mended()
        self.interrupted = False
        return restored

    def remove(self, ids: Sequence[str]) -> None:
        # Soft contexts first: what is left after an interruption is still listed by `roots`.
        self.store.delete(ids)
        self._passages.delete(ids)

    def roots(self) -> dict[str, dict[str, str]]:
        return self._passages.roots()

    def search(self, questions: Sequence[str], k: int) -> list[list[IndexHit]]:
        """Return the `k` best passages for each question, or fewer, of distinct texts. StoreError for an empty index.

        They are those with the nearest vectors, below those that rare words of the question name (see `WordSearch`).
        """
        if not all(question.strip() for question in questions):
            raise ConfigError("the question is empty: ask something")
        vectors = embed_questions(questions, self.embedder)
        copies, words = self._texts()
        if not copies:
            raise StoreError(f"{self._passages.place.where} holds no passages: run `ctx-compress index` first")
        found = []
        for question, vector, near in zip(questions, vectors, self._nearest(vectors, min(k, len(copies))), strict=True):
            named = words.leading(question)
            if far := [text for text in named if text not in near]:
                similar = embed_passages(far, self.embedder) @ vector
                near |= {t: (next(iter(copies[t])), float(cosine)) for t, cosine in zip(far, similar, strict=True)}
            best = list(dict.fromkeys([*named, *near]))[:k]
            sources = {text: ", ".join(sorted(set(copies.get(text, {}).values()))) for text in best}
            found.append([IndexHit(near[text][0], text, sources[text], near[text][1]) for text in best])
        return found

    def _nearest(self, vectors: Any, k: int) -> list[dict[str, tuple[str, float]]]:
        """Return, for each vector, id and cosine of the nearest passages, by text, until there are `k` texts."""
        count, most = len(self), 2 * k
        while True:
            found: list[dict[str, tuple[str, float]]] = [{} for _ in vectors]
            for near, hits in zip(found, self._passages.query(vectors, min(most, count)), strict=True):
                for id, text, _, far in hits:
                    near.setdefault(text, (id, 1 - far))
            if most >= count or min(map(len, found)) >= k:
                return found
            most *= 2

    def _texts(self) -> tuple[dict[str, dict[str, str]], WordSearch]:
        """Return the source by id of all passages of each text, and the texts' words, read anew after each write."""
        generation = self._passages.generation()
        if self._read is None or not generation or self._read[0] != generation:
            copies: dict[str, dict[str, str]] = {}
            for id, (text, row) in self._passages.texts(self._passages.ids()).items():
                copies.setdefault(text or "", {})[id] = str(row.get("source"))
            self._read = generation, copies, WordSearch(copies)
        return self._read[1:]

    def __len__(self) -> int:
        return self._passages.count()

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_index(
    folder: str | Path,
    bundle: str | None = None,
    *,
    codec: str | None = None,
    create: bool = False,
    embedder: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    llama_cpp: str | None = None,
) -> PassageIndex:
    """Open the index in a Chroma folder, or with `create` a new one. Mend it if a process was killed while it wrote.

    Bundle and embedder (a sentence-transformers model) are folders, hub ids or shipped names. None takes those of the
    index or, for a new one, the shipped English bundle and the packaged MiniLM. `codec` is that of `SoftContextStore`,
    `device` and `dtype` are those of `Bundle.from_pretrained`; `llama_cpp`, llama.cpp's weights, opens the bundle only
    to answer with that engine (see `open_for_llama_cpp`). Raises StoreError if there is no index to open, or if it
    is of another embedder, and FingerprintMismatchError if it is of another bundle.
    """
    check_index_exists(folder, create)
    if embedder:
        load_embedder(embedder)  # refuse a missing one before a folder is made
    with ExitStack() as on_error:
        place = on_error.enter_context(closing(connect_store(str(folder))))
        recorded, made_with = PassageCollection(place, COLLECTION).made_with()
        asked = embedder and _lasting(embedder)
        if recorded and asked not in (None, made_with):
            raise StoreError(
                f"the index in {folder} was made with the embedder {made_with!r}, not {asked!r}: leave --embedder out, "
                "or index into another folder"
            )
        name = bundle or recorded or DEFAULT_BUNDLE
        loaded: AnyBundle
        if llama_cpp is None:
            from ctx_compress_rag.bundle.bundle import Bundle

            loaded = Bundle.from_pretrained(name, device=device, dtype=dtype)
        else:
            from ctx_compress_rag.decoding.engines.llama_cpp import open_for_llama_cpp

            loaded = open_for_llama_cpp(name, llama_cpp)
        index = PassageIndex(place, loaded, _lasting(name), codec, asked or made_with)
        if index.interrupted:
            index.mend()
        on_error.pop_all()
    return index


@dataclass(frozen=True)
class IndexInfo:
    """The contents of an index, without its passages."""

    store: StoreInfo
    bundle_name: str  # name or path of the bundle
    embedder: str
    sources: int  # number of files or rows
    # Ids of soft contexts whose passage is not, or was not, in the index: another program removed it, or a
    # postprocessor compressed a text under another id.
    orphans: list[str]


def inspect_index(folder: str | Path, prune: bool = False) -> IndexInfo:
    """Return what is in an index. With `prune`, first delete `IndexInfo.orphans`. Raise StoreError if there is none."""
    check_index_exists(folder)
    with closing(connect_store(str(folder))) as place:
        passages, soft = PassageCollection(place, COLLECTION), ChromaCollection(place, f"{COLLECTION}-ctx")
        about, (name, embedder) = soft.metadata(), passages.made_with()
        if not about:
            raise StoreError(
                f"{place.where} holds no index: make one with `ctx-compress index`; SoftContextStore.info() "
                "describes an app's own collection"
            )
        own = {passage_id(id) for id in soft.ids() if owned_by_scope(id, DEFAULT_SCOPE)} if name else set()
        orphans = sorted(own.difference(passages.ids()))
        if prune:
            soft.delete([record_id(id, DEFAULT_SCOPE) for id in orphans])
        sources = sum(len(set(sources.values())) for sources in passages.roots().values())
        return IndexInfo(summarize_store(soft, about), name or str(about["bundle"]), embedder, sources, orphans)


def check_index_exists(folder: str | Path, create: bool = False) -> None:
    """Raise StoreError if Chroma cannot open a folder, or if it holds no store and `create` is False."""
    check_store_folder_name(str(folder))
    # Chroma would make the folder; a caller that only reads should be told that the path is wrong.
    if not create and not has_chroma_database(Path(folder)):
        raise StoreError(f"no store at {str(folder)!r}: make one with `ctx-compress index DIR --index {folder}`")


def _lasting(address: str) -> str:
    """Return a bundle's or model's name or path in a form that is valid in any working folder."""
    return str(Path(address).resolve()) if address not in SHIPPED and Path(address).is_dir() else address
