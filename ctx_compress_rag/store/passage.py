"""The passages that go into a store and come out of it, and the store's reports."""

import hashlib
import logging
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import chromadb
import numpy as np

from ctx_compress_rag.errors import ConfigError, short_repr
from ctx_compress_rag.store.collection import AppCollection, chroma_batches, chroma_pages
from ctx_compress_rag.store.place import check_app_collection
from ctx_compress_rag.strict import as_list

logger = logging.getLogger(__name__)

_BATCH_CHARACTERS = 65_536
"""Maximum characters compressed between two writes, about two forward passes. A killed process loses no more.

Batches do not depend on timing: which passages share a batch affects the last bits of their slots.
"""

MAX_CHARACTERS = 1_000_000
"""A longer passage is refused: its slots alone would fill every decoder's window, and compressing it takes minutes."""
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Passage:
    """A piece of source text.

    Attributes:
        text: the text.
        id: the id; None takes a hash of the text.
        metadata: anything; only scalars are stored.

    ```python
    Passage("The harbor was built by Oda Brink.", id="harbor", metadata={"source": "history.txt", "page": 3})
    ```
    """

    text: str
    id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        words = textwrap.shorten(self.text, 60, placeholder=" ...") if isinstance(self.text, str) else self.text
        return f"Passage({words!r}, id={self.id!r}, metadata={dict(self.metadata)!r})"


@dataclass(frozen=True)
class StoredPassage:
    """A passage in the store.

    Attributes:
        id: its id.
        text: its text.
        metadata: its metadata.
        n_slots: number of its slots, at the base ratio.
        n_tokens: number of its source tokens.
        sentences: the packed vectors of its sentences (see `store.record`); "" if none are stored.
        marker: the letters that name it in markers; "" if its slots are damaged.
    """

    id: str
    text: str
    metadata: dict[str, Scalar]
    n_slots: int
    n_tokens: int
    sentences: str = field(default="", repr=False)
    marker: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True)
class AddReport:
    """The numbers of passages that `add` found new, changed (text or metadata) and unchanged."""

    added: int
    updated: int
    unchanged: int


@dataclass(frozen=True)
class SyncReport(AddReport):
    """An AddReport with the number of passages that `sync` deleted."""

    deleted: int


@dataclass(frozen=True)
class StoreInfo:
    """The contents and the size of a store, with all its scopes. Damaged records are not counted.

    `payload_bytes` is the size of the encoded slots before base64. `disk_bytes` is the size of the whole folder.
    `disk_bytes` and `payload_share` (`payload_bytes` over `disk_bytes`, 0 to 1) are None for a store without a folder.
    """

    location: str
    collection: str
    bundle: str
    fingerprint: str
    codec: str
    base_ratio: int
    passages: int
    slots: int
    source_tokens: int
    payload_bytes: int
    disk_bytes: int | None

    @property
    def payload_share(self) -> float | None:
        return self.payload_bytes / self.disk_bytes if self.disk_bytes else None


def passage_content_id(text: str) -> str:
    """Return the id of a passage that is given without one, a hash (32 hex digits) of its text."""
    return hashlib.sha256(_utf8(text, "a passage")).hexdigest()[:32]


def checked_passage(document: object, id: str | None, place: int) -> Passage:
    """Return a string, Passage, LangChain Document or LlamaIndex node (scored or not) as a checked Passage with an id.

    The id is `id`, else the document's own, else a hash of the text. Messages name `place`, the document's index.
    Metadata keep only scalars that JSON can hold, also NumPy's. Nested values and NaN are dropped without an error.

    Raises ConfigError for another kind of document, for a text that is blank, too long or not a str, and for an id or
    metadata that are not valid.
    """
    node: Any = getattr(document, "node", document)
    found: tuple[Any, Any, Any]
    if isinstance(document, str):
        found = document, None, {}
    elif isinstance(document, Passage):
        found = document.text, document.id, document.metadata
    elif hasattr(document, "page_content"):
        found = document.page_content, getattr(document, "id", None), getattr(document, "metadata", {})
    elif hasattr(node, "get_content") and hasattr(node, "node_id"):
        found = node.get_content(), node.node_id, node.metadata
    else:
        kind = type(document).__name__
        raise ConfigError(f"cannot read a passage from {kind}: give a str, Passage, Document or LlamaIndex node")
    text, own, metadata = found
    name = (None if own == "" else own) if id is None else id
    label = f"documents[{place}]" if name is None else f"passage {short_repr(name)}"
    if not isinstance(text, str):
        raise ConfigError(f"{label} has a text of type {type(text).__name__}, not str")
    if not text.strip():
        raise ConfigError(f"{label} has no text: leave blank passages out")
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{label} has {len(text):,} characters, over {MAX_CHARACTERS:,}: cut it by a text splitter")
    _utf8(text, label)
    if name is None:
        name = passage_content_id(text)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a passage id must be a non-empty str, got {short_repr(name)}")
    _utf8(name, "a passage id")
    if not isinstance(metadata, Mapping):
        raise ConfigError(f"{label} has metadata of type {type(metadata).__name__}, not a mapping")
    return Passage(text, name, _scalars(metadata))


def listed_passages(
    documents: Iterable[object] | chromadb.Collection, ids: Iterable[str] | None = None
) -> list[Passage]:
    """Return a passage with an id for each document (see `checked_passage`) or each record of a Chroma collection.

    `ids` None takes their own. Raises ConfigError if a document is not valid, or if the number of ids is another.
    """
    if isinstance(documents, chromadb.Collection):
        documents = collection_passages(documents)
    if isinstance(documents, str | Mapping) or not isinstance(documents, Iterable):
        raise ConfigError(
            f"documents must be a list, got {type(documents).__name__}: put a single text into a list, and in place of "
            "a framework's vector store, or of what its `get` returned, give its chromadb collection"
        )
    items = list(documents)
    names = [None] * len(items) if ids is None else as_list("ids", ids)
    if len(names) != len(items):
        raise ConfigError(f"{len(names)} ids for {len(items)} documents: give one id per document")
    return [checked_passage(item, name, place) for place, (item, name) in enumerate(zip(items, names, strict=True))]


def unique_passages(listed: Iterable[Passage]) -> dict[str, Passage]:
    """Return passages by id, in order. Raise ConfigError if an id is given twice, but equal texts without ids may."""
    passages: dict[str, Passage] = {}
    for passage in listed:
        known = passages.setdefault(str(passage.id), passage)
        if known is not passage and (known.text != passage.text or passage.id != passage_content_id(passage.text)):
            raise ConfigError(f"passage id {passage.id!r} is given twice: ids must be unique within one call")
    return passages


def checked_passage_ids(ids: Iterable[str]) -> list[str]:
    """Return the ids as a list. Raise ConfigError if `ids` is not a list, or an id is not a str of valid Unicode."""
    listed = as_list("ids", ids)
    for id in listed:
        if not isinstance(id, str):
            raise ConfigError(f"ids must be str, got the {type(id).__name__} {short_repr(id)}")
        _utf8(id, f"the id {short_repr(id)}")
    return listed


def collection_passages(collection: chromadb.Collection) -> Iterator[Passage]:
    """Yield the passages of the app's collection, read page by page, without records whose text is missing or blank.

    Records that the app's search cannot find are included, with a warning. Raises ConfigError for another object.
    """
    if not isinstance(collection, chromadb.Collection):
        kind = f"{type(collection).__module__}.{type(collection).__qualname__}"
        raise ConfigError(f"{kind} is not a chromadb.Collection: give client.get_collection(NAME) of a Chroma client")
    check_app_collection(collection)
    records = AppCollection(collection)
    for ids in chroma_pages(records.ids()):
        for id, (text, metadata) in records.texts(ids).items():
            if text and text.strip():
                yield Passage(text, id, metadata)
    if lost := records.unsearchable():
        logger.warning(
            "%d records of the collection %r are in no search result (first: %r): Chroma's index lost them, as it may "
            "when a process is killed; add them again with the app that made them",
            len(lost),
            collection.name,
            lost[0],
        )


def passage_batches(passages: Mapping[str, Passage]) -> Iterator[dict[str, Passage]]:
    """Yield passages in order, in batches to compress and write together."""
    return chroma_batches(passages, lambda passage: len(passage.text), _BATCH_CHARACTERS)


def _utf8(text: str, label: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{label} is not valid Unicode ({error.reason} at {error.start}): decode it again") from error


def _scalars(metadata: Mapping[Any, Any]) -> dict[str, Scalar]:
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in metadata.items()}
    return {
        key: value for key, value in plain.items() if isinstance(key, str) and is_storable(key) and is_storable(value)
    }


def is_storable(value: object) -> bool:
    """Whether a value is a scalar that JSON in UTF-8 can hold, and that other programs read as it is."""
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None or (isinstance(value, float) and math.isfinite(value))
