"""What the command line keeps in a Chroma folder: a collection to retrieve from, and its soft contexts.

The collection `passages` holds texts, metadata and MiniLM vectors (cosine), as any RAG app's collection
does; langchain-chroma and LlamaIndex can open it. `SoftContextStore` puts the soft contexts beside it,
under the same ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Self

import chromadb
from chromadb.errors import NotFoundError
from tqdm.auto import tqdm

from ctx_compress_rag.errors import ConfigError, StoreError
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.stores import AddReport, Passage, SoftContextStore, StoreInfo
from ctx_compress_rag.stores.connect import Connection, connect
from ctx_compress_rag.stores.lock import WriterLock
from ctx_compress_rag.text.minilm import load_minilm

if TYPE_CHECKING:
    from ctx_compress_rag.bundle import Bundle

COLLECTION = "passages"
_BUNDLE_KEY = "ctx_bundle"
_COSINE: Any = {"hnsw": {"space": "cosine"}}
_EMBED_BATCH = 128
_PAGE = 2000


def make_passage(text: str, source: str, root: str) -> Passage:
    """A passage whose id depends on where it is from and on its text, so that a changed text has another id.

    Args:
        text: the passage.
        source: its file within the root, or another name a reader can look it up by.
        root: the folder that was indexed.
    """
    digest = hashlib.sha256("\0".join((root, source, text)).encode()).hexdigest()[:16]
    return Passage(text, f"{source}#{digest}", {"source": source, "root": root})


@dataclass(frozen=True)
class Hit:
    """A retrieved passage; `similarity` is the cosine of its vector and the question's."""

    id: str
    text: str
    source: str
    similarity: float


class PassageIndex:
    """Passages to retrieve, and their soft contexts. Open one with `open_index`.

    Attributes:
        bundle: the bundle.
        store: the soft contexts.
    """

    def __init__(self, connection: Connection, bundle: Bundle, bundle_name: str, codec: str | None) -> None:
        assert connection.folder is not None
        self.bundle = bundle
        self.store = SoftContextStore(connection.client, bundle, collection=COLLECTION, codec=codec)
        self._connection = connection
        self._bundle_name = bundle_name
        self._collection = _find_collection(connection)
        self._lock = WriterLock(connection.folder)

    def add(self, passages: Sequence[Passage], progress: bool = True) -> AddReport:
        """Store the passages that are missing: vectors first, then soft contexts.

        Both are written batch by batch; after an interruption the same call goes on where it ended.

        Args:
            passages: as `make_passage` makes them.
            progress: show progress bars.
        """
        self._lock.take()
        collection = self._writable()
        known = self._known([str(passage.id) for passage in passages])
        missing = [passage for passage in passages if passage.id not in known]
        if missing:
            with tqdm(total=len(missing), desc="embedding", unit="passage", disable=not progress) as bar:
                for start in range(0, len(missing), _EMBED_BATCH):
                    batch = missing[start : start + _EMBED_BATCH]
                    texts = [passage.text for passage in batch]
                    metadatas: Any = [dict(passage.metadata) for passage in batch]
                    collection.upsert([str(p.id) for p in batch], _vectors(texts), metadatas, texts)
                    bar.update(len(batch))
        return self.store.add(passages, progress=progress)

    def remove(self, ids: Sequence[str]) -> None:
        """Remove passages from both collections."""
        if not ids:
            return
        self._lock.take()
        # Soft contexts first: what is left after an interruption is still listed by `sources`.
        self.store.delete(ids)
        for start in range(0, len(ids), _PAGE):
            self._writable().delete(ids=list(ids[start : start + _PAGE]))

    def sources(self, root: str) -> dict[str, str]:
        """The source of every passage from `root`, by id."""
        found: dict[str, str] = {}
        while self._collection is not None:
            page = self._collection.get(where={"root": root}, limit=_PAGE, offset=len(found), include=["metadatas"])
            if not page["ids"]:
                break
            found |= {id: str(data["source"]) for id, data in zip(page["ids"], page["metadatas"] or [], strict=True)}
        return found

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        """The `k` nearest passages of each question, nearest first; fewer where there are fewer.

        Raises:
            ConfigError: a question is blank, or k is below 1.
            StoreError: there are no passages.
        """
        if k < 1:
            raise ConfigError(f"cannot retrieve {k} passages: ask for 1 or more")
        if not all(question.strip() for question in questions):
            raise ConfigError("the question is empty: ask something")
        count = len(self)
        if not count or self._collection is None:
            raise StoreError(f"{self._connection.where} holds no passages: run `ctx-compress index` first")
        result: Any = self._collection.query(
            query_embeddings=_vectors(questions),
            n_results=min(k, count),
            include=["documents", "metadatas", "distances"],
        )
        rows = zip(*(result[key] for key in ("ids", "documents", "metadatas", "distances")), strict=True)
        return [
            [Hit(id, text, str(data["source"]), 1 - distance) for id, text, data, distance in zip(*row, strict=True)]
            for row in rows
        ]

    def __len__(self) -> int:
        return self._collection.count() if self._collection else 0

    def close(self) -> None:
        """Let other processes write."""
        self.store.close()
        self._lock.release()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _known(self, ids: Sequence[str]) -> set[str]:
        known: set[str] = set()
        for start in range(0, len(ids), _PAGE):
            known.update(self._writable().get(ids=list(ids[start : start + _PAGE]), include=[])["ids"])
        return known

    def _writable(self) -> chromadb.Collection:
        if self._collection is None:
            self._collection = self._connection.client.create_collection(
                COLLECTION,
                configuration=_COSINE,
                metadata={_BUNDLE_KEY: self._bundle_name},
                embedding_function=None,
            )
        return self._collection


def default_bundle() -> str:
    """The shipped bundle for a user's own text: the one that reads English, where it is shipped."""
    from ctx_compress_rag.bundle import SHIPPED

    return "english" if "english" in SHIPPED else "demo"


def open_index(
    folder: str | Path,
    bundle: str | None = None,
    *,
    codec: str | None = None,
    create: bool = False,
    default: str | None = None,
) -> PassageIndex:
    """Open the index in a Chroma folder.

    Args:
        folder: the folder.
        bundle: a bundle's folder, shipped name or hub id; None takes the one it was made with, or `default`.
        codec: codec of a new store.
        create: make the folder if there is none.
        default: the bundle of a new index; None takes the shipped one for a user's own text.

    Raises:
        StoreError: there is no index, or it cannot be opened.
        BundleError, FingerprintMismatchError: see `Bundle.from_pretrained` and `SoftContextStore`.
    """
    from ctx_compress_rag.bundle import Bundle

    connection = _connect(folder, create)
    try:
        name = bundle or _recorded(_find_collection(connection)) or default or default_bundle()
        return PassageIndex(connection, Bundle.from_pretrained(name), _lasting(name), codec)
    except BaseException:
        connection.close()
        raise


@dataclass(frozen=True)
class IndexInfo:
    """What is in an index: the store's own account, the bundle's address and how many sources there are."""

    store: StoreInfo
    bundle_name: str
    sources: int


def inspect_index(folder: str | Path) -> IndexInfo:
    """What is in an index, read without loading its bundle.

    Raises:
        StoreError: there is no index, or nothing in it.
    """
    connection = _connect(folder, create=False)
    try:
        collection = _find_collection(connection)
        try:
            about = connection.client.get_collection(connection.companion, embedding_function=None).metadata or {}
        except NotFoundError:
            raise StoreError(f"{connection.where} holds no soft contexts: run `ctx-compress index` first") from None
        with SoftContextStore(connection.client, _Recorded(about), collection=COLLECTION) as store:
            return IndexInfo(store.info(), _recorded(collection) or str(about["bundle"]), _count_sources(collection))
    finally:
        connection.close()


class _Recorded:
    """A store's bundle as its collection describes it: enough to read by, not to compress with."""

    def __init__(self, about: Any) -> None:
        self.config = SimpleNamespace(name=about["bundle"], base_ratio=about["base_ratio"])
        self.compressor = SimpleNamespace(nestable=False, question_aware=False)
        self.fingerprint: str = about["fingerprint"]

    def made(self, fingerprint: str) -> bool:
        return fingerprint == self.fingerprint

    def compress(self, texts: Sequence[str], ratio: int | None = None) -> list[SoftContext]:
        raise StoreError(f"the store was opened without its bundle: cannot compress {len(texts)} passages")


def _connect(folder: str | Path, create: bool) -> Connection:
    # Chroma would make the folder; whoever only reads should hear that the path is wrong.
    if not create and not (Path(folder) / "chroma.sqlite3").exists():
        raise StoreError(f"no store at {str(folder)!r}: make one with `ctx-compress index DIR --store {folder}`")
    return connect(str(folder), COLLECTION)


def _find_collection(connection: Connection) -> chromadb.Collection | None:
    try:
        collection = connection.client.get_collection(COLLECTION, embedding_function=None)
    except NotFoundError:
        return None
    if _recorded(collection) is None:
        raise StoreError(
            f"the collection {COLLECTION!r} in {connection.where} was not made by `ctx-compress index`: choose another "
            "folder, or put soft contexts beside it with SoftContextStore"
        )
    return collection


def _recorded(collection: chromadb.Collection | None) -> str | None:
    """The address of the bundle that an index was made with."""
    name = (collection.metadata or {}).get(_BUNDLE_KEY) if collection is not None else None
    return None if name is None else str(name)


def _lasting(bundle: str) -> str:
    """A bundle's address that holds from any working folder."""
    from ctx_compress_rag.bundle import SHIPPED

    return str(Path(bundle).resolve()) if bundle not in SHIPPED and Path(bundle).is_dir() else bundle


def _count_sources(collection: chromadb.Collection | None) -> int:
    sources: set[tuple[str, str]] = set()
    offset = 0
    while collection is not None:
        metadatas: Any = collection.get(limit=_PAGE, offset=offset, include=["metadatas"])["metadatas"]
        if not metadatas:
            break
        sources.update((data["root"], data["source"]) for data in metadatas)
        offset += len(metadatas)
    return len(sources)


def _vectors(texts: Sequence[str]) -> Any:
    """(texts, 384) unit vectors."""
    return load_minilm().encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
