"""What a vacuum changes in collections for a moment, and how that is undone, also after a kill.

A vacuum lowers `sync_threshold` and writes passing records. The earlier thresholds are in a file in the folder until
they are restored; whoever writes next and finds that file restores them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chromadb.api import ClientAPI
from chromadb.errors import ChromaError

from ctx_compress_rag.errors import StoreError

logger = logging.getLogger(__name__)

NOTE = "ctx-compress.vacuum.json"
AT_ONCE = 2  # Chroma's minimum: after this many writes it writes the index and empties the log
PASSING = [f"ctx-compress-vacuum-{number}" for number in range(AT_ONCE)]


def note(client: ClientAPI, folder: Path, thresholds: Mapping[str, int]) -> None:
    """Write down the `sync_threshold` of each collection, by name, before it is changed.

    Raises:
        StoreError: the file cannot be written.
    """
    file, part = folder / NOTE, folder / f"{NOTE}.part"
    noted = {"tenant": client.tenant, "database": client.database, "sync_threshold": dict(thresholds)}
    try:
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8") as opened:  # "x" follows no symbolic link
            json.dump(noted, opened)
            opened.flush()
            os.fsync(opened.fileno())
        part.replace(file)
    except OSError as error:
        raise StoreError(
            f"cannot write {file} ({error.strerror}): check that the disk has room and that nothing else has this name"
        ) from error


def undo(client: ClientAPI, folder: Path) -> None:
    """Remove the passing records, restore the thresholds and delete the file. Without the file, do nothing.

    A damaged file is deleted with a warning. One of another tenant or database is left, and one of a collection whose
    index is damaged, with a warning.

    Raises:
        StoreError: the file cannot be read or deleted.
    """
    file = folder / NOTE
    if not file.is_file():
        return
    try:
        thresholds = _read(file, client)
        if thresholds is None:
            return
        damaged = False
        for collection in client.list_collections():
            if collection.name not in thresholds:
                continue
            try:
                if left := collection.get(ids=PASSING, include=[])["ids"]:
                    collection.delete(left)
            except ChromaError as error:  # its index is damaged, which must not keep others from being written to
                damaged = True
                logger.warning(
                    "records %s, which an interrupted vacuum left, may still be in collection %r (%s): run "
                    "`ctx-compress repair`; if that cannot rebuild the collection's index, make the collection again",
                    " and ".join(PASSING),
                    collection.name,
                    error,
                )
            # Another value is not the vacuum's: the app has set it since.
            if (collection.configuration.get("hnsw") or {}).get("sync_threshold") == AT_ONCE:
                collection.modify(configuration={"hnsw": {"sync_threshold": thresholds[collection.name]}})
        if not damaged:
            file.unlink()
    except OSError as error:
        raise StoreError(
            f"cannot read and delete {file}, which an interrupted vacuum left ({error.strerror}): check that this user "
            "may do so"
        ) from error


def _read(file: Path, client: ClientAPI) -> dict[str, int] | None:
    """The thresholds by collection: none if the file is damaged, None if they are another database's."""
    try:
        noted: Any = json.loads(file.read_bytes())
        owner, thresholds = (noted["tenant"], noted["database"]), dict(noted["sync_threshold"])
        if not all(type(each) is int and 0 < each < 1 << 63 for each in thresholds.values()):
            raise ValueError("a sync_threshold is not a positive whole number")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning(
            "%s is damaged (%r) and is deleted: run `ctx-compress vacuum`, which removes the records that an "
            "interrupted one left; then set sync_threshold of your collections again (collection.modify)",
            file,
            error,
        )
        return {}
    return thresholds if owner == (client.tenant, client.database) else None
