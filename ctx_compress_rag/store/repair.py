"""Rebuild the index of a folder from its records when Chroma can no longer read it.

Chroma keeps ids, texts and metadata, and so the soft contexts, in SQLite; its index has only vectors, in files of
its own. A companion's vectors are all the same; those of other collections must be recomputed from the texts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctx_compress_rag.store import probe
from ctx_compress_rag.store.backup import copy
from ctx_compress_rag.store.collection import EMBEDDING
from ctx_compress_rag.store.folder import Folder
from ctx_compress_rag.store.pages import WRITE_RECORDS, pages
from ctx_compress_rag.store.sqlite import SqliteCollection

Embed = Callable[[Sequence[str]], Any]
"""From texts to vectors."""
_DOCUMENT = "chroma:document"  # Chroma's name for a record's text in the metadata


@dataclass(frozen=True)
class Rebuilt:
    """The result of `rebuild` for a folder's collections.

    Attributes:
        records: how many records have a new index, by collection.
        broken: collections whose index is damaged and whose vectors only the app can make.
        companions: names of the collections that have a companion with soft contexts.
    """

    records: dict[str, int]
    broken: list[str]
    companions: list[str]


def rebuild(folder: Folder, backup: Path, embedder: Callable[[Mapping[str, Any]], Embed | None]) -> Rebuilt:
    """Copy a folder, then rebuild the index of each companion, and of other collections if it is damaged.

    Nobody else reads or writes meanwhile. After an interruption, a call with another `backup` starts again.

    Args:
        folder: the folder.
        backup: where the copy goes; must not exist yet.
        embedder: from a collection's metadata to the function that makes its vectors; None if that is unknown.

    Raises:
        StoreError: see `back_up`.
        StoreLockedError: others wrote for too long, or a Chroma server runs on the folder.
    """
    rebuilt = Rebuilt({}, [], [])
    todo: list[tuple[SqliteCollection, Embed]] = []

    def drop_broken() -> None:
        copy(folder.path, backup)
        for collection in folder.sqlite().collections():
            embed = embedder(collection.metadata)
            if "ctx_format" in collection.metadata:
                rebuilt.companions.append(collection.name.removesuffix("-ctx"))
                embed = _alike
            elif _is_sound(folder.path, collection.name):
                continue
            if embed is None:
                rebuilt.broken.append(collection.name)
                continue
            shutil.rmtree(folder.path / collection.index_folder, ignore_errors=True)
            todo.append((collection, embed))

    with folder.writing(before=drop_broken) as client:
        for records, embed in todo:
            collection = client.get_collection(records.name, embedding_function=None)
            texts, ids = records.column(_DOCUMENT), records.get()["ids"]
            for part in pages(ids, WRITE_RECORDS):
                collection.upsert(ids=part, embeddings=embed([texts.get(id, "") for id in part]))
            rebuilt.records[records.name] = len(ids)
    return rebuilt


def _alike(texts: Sequence[str]) -> Any:
    return [EMBEDDING] * len(texts)


def _is_sound(folder: Path, collection: str) -> bool:
    # -P: otherwise modules beside the file would shadow installed ones of the same name
    command = [sys.executable, "-P", probe.__file__, str(folder), collection]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
