"""What the command line keeps in a Chroma folder: a collection to retrieve from, and its soft contexts.

The collection `passages` holds texts, metadata and a sentence encoder's vectors (cosine), as any RAG app's
collection does; langchain-chroma and LlamaIndex can open it. `SoftContextStore` puts the soft contexts beside it,
under the same ids.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from chromadb.errors import NotFoundError

from ctx_compress_rag.errors import ConfigError, StoreError
from ctx_compress_rag.indexing import DEFAULT_BUNDLE
from ctx_compress_rag.methods.base.reading import Reading
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import Passage, SoftContextStore, StoreInfo
from ctx_compress_rag.store.collection import column, explained
from ctx_compress_rag.store.connect import Connection, check_name, connect
from ctx_compress_rag.store.lock import DEFAULT_TIMEOUT
from ctx_compress_rag.store.marker import DEFAULT_SCOPE
from ctx_compress_rag.store.pages import pages
from ctx_compress_rag.store.passage import passage_batches
from ctx_compress_rag.store.sqlite import DATABASE, SqliteCollection
from ctx_compress_rag.text.passage_vectors import PACKAGED, load_embedder, passage_vectors, question_vectors

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle

COLLECTION = "passages"
BUNDLE_KEY = "ctx_bundle"
_EMBEDDER_KEY = "ctx_embedder"  # missing in indexes made before there was a choice
_COSINE: Any = {"hnsw": {"space": "cosine"}}
_PAGE = 2000
_LOOKED_UP = 250
"""How many passages are looked up together: as many as Chroma answers in one query."""


class Added(NamedTuple):
    """How many passages were compressed and stored now, and how many were stored before."""

    added: int
    unchanged: int


def make_passage(text: str, source: str, root: str) -> Passage:
    """Make a passage whose id depends on its root, source and text, so that a changed text has another id.

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
        bundle_name: its address, recorded in a new index.
        store: the soft contexts.
        embedder: the sentence encoder that passages and questions are compared with.
    """

    def __init__(self, folder: str, bundle: Bundle, bundle_name: str, codec: str | None, embedder: str) -> None:
        self.bundle = bundle
        self.embedder = embedder
        self.store = SoftContextStore(folder, bundle, collection=COLLECTION, codec=codec)
        self._connection = connect(folder, COLLECTION)
        self.bundle_name = bundle_name

    def add(self, passages: Iterable[Passage]) -> Iterator[Added]:
        """Store the passages that are missing; yield counts, batch by batch, once a batch is on disk.

        At most 250 passages are in memory at a time. After an interruption the same call resumes. A passage that then
        has only a vector is compressed when it is added again, or retrieved.

        Args:
            passages: as `make_passage` makes them.
        """
        stream = iter(passages)
        while group := list(islice(stream, _LOOKED_UP)):
            missing = {str(passage.id): passage for passage in self._missing(group)}
            yield Added(0, len(group) - len(missing))
            for batch in passage_batches(missing, _LOOKED_UP):
                texts = [passage.text for passage in batch.values()]
                vectors: Any = passage_vectors(texts, self.embedder)
                metadatas: Any = [dict(passage.metadata) for passage in batch.values()]
                with self._writing() as collection:
                    collection.upsert(list(batch), vectors, metadatas, texts)
                self.store.add(batch.values(), progress=False)
                yield Added(len(batch), 0)

    def _missing(self, passages: Sequence[Passage]) -> list[Passage]:
        """The passages without a vector or a soft context."""
        ids = [str(passage.id) for passage in passages]
        compressed = self.store.has([passage.text for passage in passages], ids)
        with self._reading() as collection:
            found = set(collection.get(ids=ids, include=[])["ids"]) if collection else set()
        return [p for p, id, done in zip(passages, ids, compressed, strict=True) if not (done and id in found)]

    def remove(self, ids: Sequence[str]) -> None:
        """Remove passages from both collections."""
        if not ids:
            return
        # Soft contexts first: what is left after an interruption is still listed by `sources`.
        self.store.delete(ids)
        for part in pages(list(ids), _PAGE):
            with self._writing() as collection:
                collection.delete(ids=part)

    def sources(self, root: str) -> dict[str, str]:
        """The source of every passage from `root`, by id."""
        roots = self._column("root")
        return {id: str(source) for id, source in self._column("source").items() if roots.get(id) == root}

    def search(self, questions: Sequence[str], k: int) -> list[list[Hit]]:
        """The `k` nearest passages of each question, nearest first; fewer if there are fewer.

        Raises:
            ConfigError: a question is blank, or k is below 1.
            StoreError: there are no passages.
        """
        if k < 1:
            raise ConfigError(f"cannot retrieve {k} passages: ask for 1 or more")
        if not all(question.strip() for question in questions):
            raise ConfigError("the question is empty: ask something")
        vectors = question_vectors(questions, self.embedder)
        with self._reading() as collection:
            count = collection.count() if collection else 0
            if not count:
                raise StoreError(f"{self._connection.where} holds no passages: run `ctx-compress index` first")
            if isinstance(collection, SqliteCollection):
                raise StoreError(
                    f"{self._connection.where} is read-only, or a Chroma server runs on it: its soft contexts "
                    "can be read, but Chroma cannot search its vectors; copy the folder, or stop the server"
                )
            result: Any = collection.query(
                query_embeddings=vectors, n_results=min(k, count), include=["documents", "metadatas", "distances"]
            )
        rows = zip(*(result[key] for key in ("ids", "documents", "metadatas", "distances")), strict=True)
        return [
            [Hit(id, text, str(data["source"]), 1 - distance) for id, text, data, distance in zip(*row, strict=True)]
            for row in rows
        ]

    def __len__(self) -> int:
        with self._reading() as collection:
            return int(collection.count()) if collection else 0

    def close(self) -> None:
        """Close the engine."""
        self.store.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """The collection of passages; None if there is none."""
        with explained(self._connection.where), self._connection.reading() as client:
            yield _find_collection(self._connection, client)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        with explained(self._connection.where), self._connection.writing(DEFAULT_TIMEOUT) as client:
            yield _find_collection(self._connection, client) or client.create_collection(
                COLLECTION,
                configuration=_COSINE,
                metadata={BUNDLE_KEY: self.bundle_name, _EMBEDDER_KEY: self.embedder},
                embedding_function=None,
            )

    def _column(self, field: str) -> dict[str, Any]:
        with explained(self._connection.where), self._connection.looking() as client:
            return column(_find_collection(self._connection, client), field)


def open_index(
    folder: str | Path,
    bundle: str | None = None,
    *,
    codec: str | None = None,
    create: bool = False,
    embedder: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> PassageIndex:
    """Open the index in a Chroma folder.

    Args:
        folder: the folder.
        bundle: a bundle's folder, shipped name or hub id; None takes the index's own, or for a new index the shipped
            one that reads English.
        codec: codec of a new store.
        create: make the folder if there is none.
        embedder: a sentence-transformers model, by folder or hub id; None takes the index's own, or the packaged
            MiniLM.
        device: see `Bundle.from_pretrained`.
        dtype: see `Bundle.from_pretrained`.

    Raises:
        StoreError: there is no index, it cannot be opened, or was made with another embedder.
        ConfigError: there is no such embedder.
        BundleError, FingerprintMismatchError: see `Bundle.from_pretrained` and `SoftContextStore`.
    """
    from ctx_compress_rag.bundle.bundle import Bundle

    check_there(folder, create)
    if embedder:
        load_embedder(embedder)  # refuse a missing one before a folder is made
    recorded, made_with = _recorded(folder)
    asked = embedder and _lasting(embedder)
    if recorded and asked not in (None, made_with):
        raise StoreError(
            f"the index in {folder} was made with the embedder {made_with!r}, not {asked!r}: leave --embedder out, or "
            "index into another folder"
        )
    name = bundle or recorded or DEFAULT_BUNDLE
    loaded = Bundle.from_pretrained(name, device=device, dtype=dtype)
    return PassageIndex(str(folder), loaded, _lasting(name), codec, asked or made_with)


@dataclass(frozen=True)
class IndexInfo:
    """What is in an index: the store's figures, the addresses of bundle and embedder, the number of sources.

    `orphans` are ids of soft contexts whose passage is not in the index: another program removed it, or a postprocessor
    compressed a text under another id.
    """

    store: StoreInfo
    bundle_name: str
    embedder: str
    sources: int
    orphans: list[str]


def inspect_index(folder: str | Path) -> IndexInfo:
    """What is in an index, read without loading its bundle.

    Raises:
        StoreError: there is no index, or nothing in it.
    """
    check_there(folder)
    with closing(connect(str(folder), COLLECTION)) as connection:
        with explained(connection.where), connection.looking() as client:
            passages = _find_collection(connection, client)
            roots, sources = column(passages, "root"), column(passages, "source")
        with recorded_store(folder, COLLECTION) as store:
            found = len({(roots.get(id), source) for id, source in sources.items()})
            name, embedder = _made_with(passages)
            orphans = [] if passages is None else sorted(set(store.ids(DEFAULT_SCOPE)) - sources.keys())
            return IndexInfo(store.info(), name or store.bundle.config.name, embedder, found, orphans)


def prune(folder: str | Path) -> list[str]:
    """Delete the orphans of an index; return their ids. Raises as `inspect_index` does, and StoreWriteError."""
    orphans = inspect_index(folder).orphans
    with recorded_store(folder, COLLECTION) as store:
        store.delete(orphans, DEFAULT_SCOPE)
    return orphans


def recorded_store(folder: str | Path, collection: str) -> SoftContextStore:
    """The store beside a collection, opened without its bundle, to inspect or repair it; it cannot compress.

    Raises:
        StoreError: there is none.
    """
    with (
        closing(connect(str(folder), collection)) as connection,
        explained(connection.where),
        connection.looking() as client,
    ):
        try:
            about = client.get_collection(connection.companion, embedding_function=None).metadata or {}
        except NotFoundError:
            raise StoreError(
                f"{connection.where} holds no index: make one with `ctx-compress index`; SoftContextStore.info() "
                "describes an app's own collection"
            ) from None
    return SoftContextStore(str(folder), _Recorded(about), collection=collection)


class _Recorded:
    """A store's bundle as its collection describes it: enough to read the store, not to compress."""

    def __init__(self, about: Any) -> None:
        self.config = SimpleNamespace(name=about["bundle"], base_ratio=about["base_ratio"])
        self.compressor = Reading()
        self.fingerprint: str = about["fingerprint"]

    def check_ratio(self, ratio: int) -> None:
        pass

    def compress(self, texts: Sequence[str], ratio: int | None = None) -> list[SoftContext]:
        raise StoreError(f"the store was opened without its bundle: cannot compress {len(texts)} passages")


def check_there(folder: str | Path, create: bool = False) -> None:
    """Raise StoreError if there is no store, unless it may be created, or Chroma cannot open it."""
    check_name(str(folder))
    # Chroma would make the folder; a caller that only reads should be told that the path is wrong.
    if not create and not os.path.exists(Path(folder) / DATABASE):
        raise StoreError(f"no store at {str(folder)!r}: make one with `ctx-compress index DIR --store {folder}`")


def _find_collection(connection: Connection, client: Any) -> Any:
    """The client's collection of passages; None if there is none."""
    if client is None:
        return None
    try:
        collection = client.get_collection(COLLECTION, embedding_function=None)
    except NotFoundError:
        return None
    if _made_with(collection)[0] is None:
        raise StoreError(
            f"the collection {COLLECTION!r} in {connection.where} was not made by `ctx-compress index`: choose another "
            "folder, or put soft contexts beside it with SoftContextStore"
        )
    return collection


def _recorded(folder: str | Path) -> tuple[str | None, str]:
    """The addresses of bundle and embedder that the index in a folder was made with."""
    with (
        closing(connect(str(folder), COLLECTION)) as connection,
        explained(connection.where),
        connection.reading() as client,
    ):
        return _made_with(_find_collection(connection, client))


def _made_with(collection: Any) -> tuple[str | None, str]:
    about = (collection.metadata or {}) if collection is not None else {}
    return about.get(BUNDLE_KEY), embedder_of(about)


def embedder_of(metadata: Mapping[str, Any]) -> str:
    """The embedder of an index, from its collection's metadata."""
    return str(metadata.get(_EMBEDDER_KEY, PACKAGED))


def _lasting(address: str) -> str:
    """An address of a bundle or model that is valid in any working folder."""
    from ctx_compress_rag.bundle.files import SHIPPED

    return str(Path(address).resolve()) if address not in SHIPPED and Path(address).is_dir() else address
