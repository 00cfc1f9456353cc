"""Connect to Chroma by a path, a client or a collection."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chromadb
from chromadb.api import ClientAPI
from chromadb.api.client import Client
from chromadb.config import DEFAULT_DATABASE, DEFAULT_TENANT

from ctx_compress_rag.errors import ConfigError, StoreError, StoreWriteError
from ctx_compress_rag.store.folder import Folder
from ctx_compress_rag.store.lock import DEFAULT_TIMEOUT
from ctx_compress_rag.store.sqlite import DATABASE

Location = str | os.PathLike[str] | ClientAPI | chromadb.Collection


_LONGEST = 512
_NAME = re.compile(rf"[a-zA-Z0-9][a-zA-Z0-9._-]{{1,{_LONGEST - 2}}}[a-zA-Z0-9]")  # Chroma's rule


@dataclass(frozen=True)
class Connection:
    """Where a store is.

    Attributes:
        client: the app's client for a server or memory; None for a folder.
        folder: the folder; None for a server or memory.
        companion: name of the collection that holds the soft contexts.
        where: the location, for messages.
        path: the folder as the caller spelled it.
    """

    client: ClientAPI | None
    folder: Folder | None
    companion: str
    where: str
    path: Path | None = None

    @property
    def remote(self) -> bool:
        """Whether the store is on a server, so that other machines may use it, too."""
        return self.client is not None and _is_remote(self.client)

    def reading(self, timeout: float = DEFAULT_TIMEOUT) -> AbstractContextManager[Any]:
        """A client to read with; None if nothing was ever written."""
        return nullcontext(self.client) if self.folder is None else self.folder.reading(timeout)

    def looking(self, timeout: float = DEFAULT_TIMEOUT) -> AbstractContextManager[Any]:
        """A client to read all records with; None if nothing was ever written."""
        return nullcontext(self.client) if self.folder is None else self.folder.looking(timeout)

    def writing(self, timeout: float) -> AbstractContextManager[Any]:
        """A client to write with."""
        return nullcontext(self.client) if self.folder is None else self.folder.writing(timeout)

    def disk_bytes(self) -> int | None:
        """Bytes of the whole folder; None for a server or memory."""
        if self.path is None:
            return None
        size = 0
        for file in self.path.rglob("*"):
            with suppress(FileNotFoundError):  # SQLite's journal comes and goes
                size += file.stat().st_size if file.is_file() else 0
        return size

    def close(self) -> None:
        """Close what this library opened."""
        if self.folder is not None:
            self.folder.release()


def connect(location: Location, collection: str) -> Connection:
    """Open a location. The companion of collection `x` is `x-ctx`, in the same tenant and database.

    Raises:
        ConfigError: the location is not a path, (synchronous) client or collection, or the collection's name is not
            valid.
        StoreError: the path is not a folder.
        StoreWriteError: the folder holds no store yet and is not writable.
    """
    if not isinstance(collection, str) or not _NAME.fullmatch(f"{collection}-ctx"):
        raise ConfigError(
            f"collection={collection!r}: give a name of at most {_LONGEST - len('-ctx')} letters, digits, '.', '_' and "
            "'-' that starts with a letter or digit; to give a collection itself, use it as the location"
        )
    if isinstance(location, chromadb.Collection):
        if "ctx_format" in (location.metadata or {}):
            raise ConfigError(f"{location.name!r} holds soft contexts itself: give the app's own collection")
        # A collection refers only to the server part of its client.
        client = Client.from_system(location._client._system, tenant=location.tenant, database=location.database)
        return _of_client(client, location.name)
    if isinstance(location, ClientAPI):
        return _of_client(location, collection)
    if not isinstance(location, str | os.PathLike):
        raise ConfigError(
            f"cannot keep a store in {type(location).__name__}: give a folder, a chromadb client (HttpClient, "
            "PersistentClient, EphemeralClient) or a collection; asynchronous ones are not supported"
        )
    path = os.fspath(location)
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise StoreError(f"a store needs a folder, and {path!r} is not one")
    check_name(path)
    return _of_folder(Path(path), DEFAULT_TENANT, DEFAULT_DATABASE, collection)


def check_name(folder: str) -> None:
    """Refuse a folder that Chroma cannot open; raises StoreError."""
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise StoreError(f"Chroma cannot use {folder!r}, whose name is not UTF-8: rename it, or give another") from None


def _of_client(client: ClientAPI, collection: str) -> Connection:
    settings = client.get_settings()
    if settings.is_persistent and not _is_remote(client):
        return _of_folder(Path(settings.persist_directory), client.tenant, client.database, collection)
    return Connection(client, None, f"{collection}-ctx", "a Chroma server" if _is_remote(client) else "memory")


def _of_folder(path: Path, tenant: str, database: str, collection: str) -> Connection:
    _check_there_or_makeable(path)
    return Connection(None, Folder.of(path, tenant, database), f"{collection}-ctx", str(path), path)


def _check_there_or_makeable(path: Path) -> None:
    # os.path.exists, because Path.exists raises if this user may not look there.
    if os.path.exists(path / DATABASE):
        return
    there = next(str(folder) for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))
    if not os.access(there, os.W_OK):
        raise StoreWriteError(
            f"there is no store in {path} that this user can read, and none can be made because this user may not "
            f"write to {there}: change its permissions, or give another folder"
        )


def _is_remote(client: ClientAPI) -> bool:
    return bool(client.get_settings().chroma_server_host)
