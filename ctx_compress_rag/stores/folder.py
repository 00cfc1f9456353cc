"""A Chroma folder that several processes use: an engine of our own, never older than the last write.

Chroma keeps a part of the index in memory and writes it over the files now and then, from reads too. An engine
that was opened before another process wrote would so undo what that one did. Hence every write opens its engine
after it has the lock and leaves a new generation number; a reader that finds another number opens its own again.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import chromadb
import psutil
from chromadb.api import ClientAPI
from chromadb.api.shared_system_client import SharedSystemClient
from chromadb.errors import ChromaError

from ctx_compress_rag.errors import StoreError, StoreLockedError, StoreWriteError
from ctx_compress_rag.stores import lock
from ctx_compress_rag.stores.sqlite import DATABASE, SqliteClient

_LOOK_SECONDS = 5.0  # how often a reader looks for a server that was started meanwhile
_TOKEN = 8


class Folder:
    """A folder's engine in this process, shared by the stores on it. Safe in threads.

    Args:
        path: the folder.
        tenant: Chroma's tenant.
        database: Chroma's database.
    """

    _open: dict[tuple[int, str, str, str], Folder] = {}  # noqa: RUF012
    _guard = threading.Lock()

    def __init__(self, path: Path, tenant: str, database: str) -> None:
        # Chroma shares an engine among clients of one spelling of a path: no other has this one, so that it can be
        # closed and opened again under the app's own clients.
        taken = {folder._spelling for folder in Folder._open.values()}
        self._spelling: str = str(path) + f"{os.sep}." * 2
        while self._spelling in taken:
            self._spelling += f"{os.sep}."
        self.path = path
        self._tenant, self._database = tenant, database
        self._users = 0
        self._engine: ClientAPI | None = None
        self._generation = b""
        self._served_at = -_LOOK_SECONDS
        self._served: int | None = None
        self._mutex = threading.RLock()
        self._mine = threading.local()

    @classmethod
    def of(cls, path: Path, tenant: str, database: str) -> Folder:
        """The process's Folder of a path, for one more user: each gives it back with `release`."""
        key = (os.getpid(), str(path.resolve()), tenant, database)
        with cls._guard:
            folder = cls._open.get(key)
            if folder is None:
                folder = cls._open[key] = cls(path.resolve(), tenant, database)
            folder._users += 1
            return folder

    def release(self) -> None:
        """Close the engine if this was the last user."""
        with Folder._guard:
            self._users -= 1
            if self._users:
                return
            for key in [key for key, folder in Folder._open.items() if folder is self]:
                del Folder._open[key]
        with self._mutex:
            self._close()

    @contextmanager
    def reading(self, timeout: float = lock.DEFAULT_TIMEOUT) -> Iterator[ClientAPI | SqliteClient | None]:
        """A client to read with while no other process writes; None where nothing was ever written.

        Raises:
            StoreLockedError: a single write of another process took longer than `timeout` seconds.
            StoreError: Chroma cannot open the folder.
        """
        if (mine := getattr(self._mine, "client", None)) is not None:
            yield mine
            return
        if not (self.path / DATABASE).exists():
            yield None
            return
        with lock.reader(self.path, timeout) as handle:
            yield self._readable(handle)

    @contextmanager
    def looking(self, timeout: float = lock.DEFAULT_TIMEOUT) -> Iterator[ClientAPI | SqliteClient | None]:
        """As `reading`, but by SQLite where that is safe: it is faster for sums and columns over all records."""
        if getattr(self._mine, "client", None) is not None or self._is_shared() or not (self.path / DATABASE).exists():
            with self.reading(timeout) as client:
                yield client
            return
        with lock.reader(self.path, timeout):
            yield self.sqlite()

    @contextmanager
    def alone(self, timeout: float = lock.DEFAULT_TIMEOUT) -> Iterator[None]:
        """No other process reads or writes, and no engine of this library is open on the files.

        Raises:
            StoreLockedError: others wrote for longer than `timeout` seconds, or a Chroma server runs on the folder.
            StoreWriteError: the folder is read-only.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreWriteError(f"cannot make the folder {self.path} ({error.strerror}): give another") from error
        with lock.writer(self.path, timeout) as handle:
            if (server := server_on(self.path)) is not None:
                raise StoreLockedError(
                    f"a Chroma server (process {server}) runs on {self.path}, and two writers would break it: give "
                    "chromadb.HttpClient(...) as the store's location, or stop the server"
                )
            with self._mutex:
                self._close()
                # Before the first write: a process killed in the middle leaves a number that readers do not know.
                self._generation = secrets.token_bytes(_TOKEN)
                _write_token(handle, self._generation)
            yield

    @contextmanager
    def writing(
        self, timeout: float = lock.DEFAULT_TIMEOUT, before: Callable[[], object] | None = None
    ) -> Iterator[ClientAPI]:
        """A client to write with, alone: opened after the lock was taken, and so as new as the files.

        Args:
            timeout: see `alone`, which also says what is raised.
            before: called after the lock was taken and before the client is opened.
        """
        if (mine := getattr(self._mine, "client", None)) is not None:
            yield mine
            return
        with self.alone(timeout):
            if before is not None:
                before()
            with self._mutex:
                self._engine = self._opened()
                self._mine.client = self._engine
            try:
                yield self._engine
            finally:
                self._mine.client = None

    def sqlite(self) -> SqliteClient:
        """The records by SQLite alone."""
        return SqliteClient(self.path, self._tenant, self._database)

    def _readable(self, handle: int | None) -> ClientAPI | SqliteClient:
        with self._mutex:
            if handle is None or not _may_write(self.path) or self._is_served():
                self._close()
                return self.sqlite()
            token = _read_token(handle)
            if self._engine is None or token != self._generation:
                self._close()
                self._engine, self._generation = self._opened(), token
            return self._engine

    def _is_shared(self) -> bool:
        """Whether the app has an engine of its own open on the folder, in this process."""
        settings = [system.settings for system in list(SharedSystemClient._identifier_to_system.values())]
        return any(
            each.is_persistent
            and each.persist_directory != self._spelling
            and Path(each.persist_directory).resolve() == self.path
            for each in settings
        )

    def _is_served(self) -> bool:
        if time.monotonic() - self._served_at > _LOOK_SECONDS:
            self._served, self._served_at = server_on(self.path), time.monotonic()
        return self._served is not None

    def _opened(self) -> ClientAPI:
        try:
            return chromadb.PersistentClient(self._spelling, tenant=self._tenant, database=self._database)
        except (ChromaError, ValueError) as error:
            # Chroma keeps the engine that could not start, and would return it to the next caller.
            SharedSystemClient._identifier_to_system.pop(self._spelling, None)
            raise StoreError(
                f"Chroma cannot open {self.path} ({error}): see that it is a Chroma folder of a version that this one "
                "reads, or restore it from a backup"
            ) from error

    def _close(self) -> None:
        client: Any = self._engine
        self._engine = None
        if client is None:
            return
        if hasattr(client, "close"):  # since chromadb 1.5.2
            client.close()
        else:
            system = SharedSystemClient._identifier_to_system.pop(client._identifier, None)
            if system is not None:
                system.stop()


def server_on(folder: Path) -> int | None:
    """The process id of a Chroma server of this machine that keeps its files in the folder; None if none is seen.

    Only a server whose process this user may inspect is found: Chroma itself leaves no lock while it idles.
    """
    database = str(folder / DATABASE)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if ("chroma", "run") not in zip((Path(word).stem for word in words), words[1:], strict=False):
            continue
        with suppress(psutil.Error):  # it ended, or is another user's
            if any(file.path == database for file in process.open_files()):
                return int(process.pid)
    return None


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and os.access(folder / DATABASE, os.W_OK)


def _read_token(handle: int) -> bytes:
    os.lseek(handle, 0, os.SEEK_SET)
    return os.read(handle, _TOKEN)


def _write_token(handle: int, token: bytes) -> None:
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, token)
