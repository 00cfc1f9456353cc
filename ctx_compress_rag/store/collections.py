"""The app's own Chroma collection as passages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import chromadb

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.store.pages import pages
from ctx_compress_rag.store.passage import Passage


def as_documents(documents: Iterable[object]) -> Iterable[object]:
    """The passages of a collection, or of what its `get` returned; anything else unchanged.

    Raises:
        ConfigError: a mapping is not what `get` returns, or has no documents.
    """
    if isinstance(documents, chromadb.Collection):
        return passages_in(documents)
    return _of_result(documents) if isinstance(documents, Mapping) else documents


def passages_in(collection: chromadb.Collection) -> Iterator[Passage]:
    """The passages of a collection, read page by page; records without a text, or with a blank one, are skipped.

    Raises:
        ConfigError: it is not a collection, or holds soft contexts itself.
    """
    if not isinstance(collection, chromadb.Collection):
        kind = f"{type(collection).__module__}.{type(collection).__qualname__}"
        raise ConfigError(f"{kind} is not a chromadb.Collection: give client.get_collection(NAME) of a Chroma client")
    if "ctx_format" in (collection.metadata or {}):
        raise ConfigError(f"{collection.name!r} holds soft contexts itself: give the app's own collection")
    for ids in pages(collection.get(include=[])["ids"]):
        part: Any = collection.get(ids=ids, include=["documents", "metadatas"])
        rows = zip(part["ids"], part["documents"], part["metadatas"], strict=True)
        yield from (Passage(text, id, data or {}) for id, text, data in rows if text and text.strip())


def _of_result(result: Mapping[Any, Any]) -> list[Passage]:
    ids: Any = result.get("ids")
    texts: Any = result.get("documents")
    if not _is_list(ids) or not _is_list(texts) or any(map(_is_list, ids)):
        raise ConfigError(
            "a mapping is not a list of documents: give a list, a Chroma collection, or what its "
            "get(include=['documents', 'metadatas']) returned"
        )
    data = result.get("metadatas") or [{}] * len(ids)
    return [Passage(text, id, row or {}) for id, text, row in zip(ids, texts, data, strict=True)]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
