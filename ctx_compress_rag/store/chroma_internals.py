"""All uses of chromadb beyond its public API (chromadb<2)."""

import logging
import os
import pickletools
from collections import deque
from pathlib import Path

import chromadb
from chromadb.api import ClientAPI
from chromadb.api.client import Client
from chromadb.api.shared_system_client import SharedSystemClient
from chromadb.config import Settings

from ctx_compress_rag.errors import StoreError

logger = logging.getLogger(__name__)

_opened = False
_forked = False


def has_chroma_database(folder: Path) -> bool:
    """Whether Chroma has ever written to the folder. Finds out without an engine, because opening one would write."""
    return os.path.exists(folder / "chroma.sqlite3")  # Path.exists raises if this user may not look there


def drop_cut_indexes(folder: Path) -> None:
    """Delete each file of an index that a killed process began to write: Chroma refuses to read what it belongs to.

    Chroma then begins the index anew, without records that are no longer in its log (`ChromaCollection.unsearchable`).
    """
    for path in folder.glob("*/index_metadata.pickle"):
        try:
            deque(pickletools.genops(path.read_bytes()), maxlen=0)  # reads all, and executes nothing
        except ValueError:
            logger.warning("deleted %s, which a killed process had begun to write: searches may miss records", path)
            path.unlink()


def open_chroma_engine(folder: Path, tenant: str, database: str) -> Client:
    """Open a new Chroma engine on a folder, which no other client shares. Raise whatever Chroma raises."""
    global _opened
    _opened = True
    # Chroma shares an engine among clients that spell a path the same way: a spelling that nobody uses gives an engine
    # that can be closed while the app's own clients are open.
    path = f"{folder}{os.sep}."
    while path in SharedSystemClient._identifier_to_system:
        path += f"{os.sep}."
    try:
        return chromadb.PersistentClient(path, tenant=tenant, database=database)  # type: ignore[return-value]
    except BaseException:
        # Chroma keeps an engine that failed to start, and would return it to the next caller (its issue 6499).
        SharedSystemClient._identifier_to_system.pop(path, None)
        raise


def chroma_settings(opened: ClientAPI | chromadb.Collection) -> Settings:
    return opened._client._system.settings if isinstance(opened, chromadb.Collection) else opened.get_settings()


def chroma_client(collection: chromadb.Collection) -> ClientAPI:
    """Return a client with a collection's connection, tenant and database; the collection has no client itself."""
    return Client.from_system(collection._client._system, tenant=collection.tenant, database=collection.database)


def check_chroma_not_forked() -> None:
    """Raise StoreError in a child process whose parent had opened an embedded Chroma before the fork.

    Locks that Chroma's threads held stay locked in the child, where these threads are not: a new engine would hang.
    """
    if _forked:
        raise StoreError(
            "this process was forked from one that had opened a Chroma folder, and Chroma would hang in it: start "
            "processes with 'spawn' or 'forkserver', or fork before the first store or Chroma client is opened"
        )


def _note_fork() -> None:
    global _forked
    systems = SharedSystemClient._identifier_to_system.values()  # the app's engines, too
    _forked = _forked or _opened or any(not system.settings.chroma_server_host for system in systems)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
