"""Remove the bytes of deleted records from a folder.

SQLite keeps deleted bytes in the file until they are overwritten, the full-text index keeps pieces of deleted texts,
and Chroma's log keeps the last writes of each collection, including texts, until the collection's index is written.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

from ctx_compress_rag.errors import StoreError
from ctx_compress_rag.store.folder import Folder
from ctx_compress_rag.store.sqlite import DATABASE
from ctx_compress_rag.store.unfinished import AT_ONCE, PASSING, note, undo

_FULL_TEXT = "embedding_fulltext_search"


def vacuum(folder: Folder) -> int:
    """Overwrite deleted records and free their space; return the bytes freed.

    Nobody else reads or writes meanwhile. After an interruption, the next write to the folder restores what this
    changes for a moment. The vectors of deleted records stay in the index of a collection that is searched.

    Raises:
        StoreError: the database is damaged, or the disk has no room for a second copy of it.
        StoreLockedError: others wrote for too long, or a Chroma server runs on the folder.
        StoreWriteError: the folder is read-only.
    """
    database = folder.path / DATABASE
    before = database.stat().st_size
    with folder.writing() as client:
        written: dict[str, int] = {}
        for collection in client.list_collections():
            threshold = (collection.configuration.get("hnsw") or {}).get("sync_threshold")
            if threshold and collection._model.dimension is not None:  # otherwise nothing was ever written to it
                written[collection.name] = threshold
        note(client, folder.path, written)
        for name in written:
            collection = client.get_collection(name, embedding_function=None)
            collection.modify(configuration={"hnsw": {"sync_threshold": AT_ONCE}})
        client = folder.reopened()  # has the new thresholds
        for name in written:
            collection = client.get_collection(name, embedding_function=None)
            vector: Any = [1.0] + [0.0] * ((collection._model.dimension or 1) - 1)
            collection.upsert(PASSING, [vector] * AT_ONCE)
        undo(client, folder.path)
    with folder.alone():
        try:
            with closing(sqlite3.connect(database)) as rows:
                rows.execute(f"insert into {_FULL_TEXT} ({_FULL_TEXT}) values ('optimize')")
                rows.commit()
                rows.execute("vacuum")
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot vacuum {folder.path} ({error}): check that the disk has room for a copy of {DATABASE}, and "
                "that `ctx-compress backup` finds no damage"
            ) from error
    return before - database.stat().st_size
