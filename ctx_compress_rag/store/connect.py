"""Connect to Chroma by a path, a client or a collection."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import chromadb
from chromadb.api import ClientAPI
from chromadb.config import DEFAULT_DATABASE, DEFAULT_TENANT

from ctx_compress_rag.errors import ConfigError, StoreError, StoreWriteError
from ctx_compress_rag.store.chroma import Chroma, disk_fault
from ctx_compress_rag.store.chroma_internals import check_not_forked, client_of, has_database
from ctx_compress_rag.store.folder import Folder
from ctx_compress_rag.store.lock import DEFAULT_TIMEOUT
from ctx_compress_rag.store.threads import uninterrupted

Location = str | os.PathLike[str] | ClientAPI | chromadb.Collection
T = TypeVar("T")

READ_TIMEOUT = 60.0
"""Seconds that a read waits for a write in progress, and as many for Chroma's answer."""
_LONGEST = 512
_NAME = re.compile(rf"[a-zA-Z0-9][a-zA-Z0-9._-]{{1,{_LONGEST - 2}}}[a-zA-Z0-9]")  # Chroma's rule


@dataclass(frozen=True)
class Connection:
    """Where a store is.

    Attributes:
        client: the app's client for a server or memory; None for a folder.
        folder: the folder; None for a server or memory.
        collection: name of the collection that holds the soft contexts.
        where: the location, for messages.
        remote: whether the store is on a server, so that other machines may use it, too.
        path: the folder as the caller spelled it.
    """

    client: Chroma | None
    folder: Folder | None
    collection: str
    where: str
    remote: bool = False
    path: Path | None = None

    def read(self, work: Callable[[Chroma | None], T], timeout: float = READ_TIMEOUT) -> T:
        """What `work` returns for a client to read with; it gets None if nothing was ever written.

        Raises:
            StoreLockedError: a single write of another process took longer than `timeout` seconds.
            StoreError: Chroma cannot open the folder, or did not answer for `timeout` seconds.
        """
        if self.folder is None:
            return self._limited(partial(work, self.client), timeout)
        folder = self.folder

        def locked() -> T:
            with folder.reading(timeout) as client:
                return work(client)

        return self._limited(locked, 2 * timeout)

    def write(self, work: Callable[[Chroma], T], timeout: float = DEFAULT_TIMEOUT) -> T:
        """What `work` returns for a client to write with, while nobody else reads or writes; see `Folder.writing`."""
        if self.folder is None:
            assert self.client is not None
            return uninterrupted(partial(work, self.client))
        folder = self.folder

        def locked() -> T:
            with folder.writing(timeout) as client:
                return work(client)

        return uninterrupted(locked)

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
            uninterrupted(self.folder.release)

    def _limited(self, work: Callable[[], T], seconds: float) -> T:
        try:
            return uninterrupted(work, seconds)
        except TimeoutError:
            fault = disk_fault(self.folder.path) if self.folder is not None else None
            kind = StoreWriteError if fault else StoreError
            raise kind(
                f"{self.where} has not answered for {seconds:.0f} seconds{f' ({fault})' if fault else ''}: check that "
                "its disk has room and that nothing holds it up, then restart this process, which may keep the "
                "folder locked; or wait longer (read_timeout)"
            ) from None


def connect(location: Location, collection: str) -> Connection:
    """Open a location. The soft contexts of collection `x` are in `x-ctx`, in the same tenant and database.

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
        return _of_client(client_of(location), location.name)
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


def back_up(folder: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a store's whole folder while no store writes to it; see `Folder.back_up`, also for errors."""
    connection = connect(folder, "passages")
    try:
        assert connection.folder is not None
        uninterrupted(partial(connection.folder.back_up, Path(target)))
    finally:
        connection.close()


def check_name(folder: str) -> None:
    """Refuse a folder that Chroma cannot open; raises StoreError."""
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise StoreError(f"Chroma cannot use {folder!r}, whose name is not UTF-8: rename it, or give another") from None


def _of_client(client: ClientAPI, collection: str) -> Connection:
    settings = client.get_settings()
    host = settings.chroma_server_host
    if settings.is_persistent and not host:
        return _of_folder(Path(settings.persist_directory), client.tenant, client.database, collection)
    if not host:
        check_not_forked()  # an engine in memory
    where = f"the Chroma server {host}:{settings.chroma_server_http_port}" if host else "memory"
    return Connection(Chroma(client, where), None, f"{collection}-ctx", where, remote=bool(host))


def _of_folder(path: Path, tenant: str, database: str, collection: str) -> Connection:
    check_not_forked()  # before any lock of this process, which a thread may have held at the fork
    if not has_database(path):
        above = next(str(folder) for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))
        if not os.access(above, os.W_OK):
            raise StoreWriteError(
                f"there is no store in {path} that this user can read, and none can be made because this user may not "
                f"write to {above}: change its permissions, or give another folder"
            )
    folder = uninterrupted(partial(Folder.of, path, tenant, database))
    return Connection(None, folder, f"{collection}-ctx", str(path), path=path)
