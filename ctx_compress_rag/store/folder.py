"""A Chroma folder that several processes use: this library's own engine, never older than the last write.

Chroma keeps part of the index in memory and sometimes writes it over the files, even while reading. So an engine
that was opened before another process's write would undo that write. Therefore each write takes the lock, opens a
new engine and leaves a new generation number; a reader that finds a new number reopens its engine.
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
from ctx_compress_rag.store import lock, unfinished
from ctx_compress_rag.store.sqlite import DATABASE, JOURNAL, SqliteClient

_LOOK_SECONDS = 5.0  # how often a reader checks whether a server has been started
_TOKEN = 8


class Folder:
    """A folder's engine in this process, shared by the stores on it. Thread-safe.

    Args:
        path: the folder.
        tenant: Chroma's tenant.
        database: Chroma's database.
    """

    _open: dict[tuple[int, str, str, str], Folder] = {}  # noqa: RUF012
    _guard = threading.Lock()

    def __init__(self, path: Path, tenant: str, database: str) -> None:
        # Chroma shares an engine among clients that spell a path the same way. This spelling is unique, so that the
        # engine can be closed and reopened while the app's own clients are open.
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
        """This process's Folder of a path, with one more user; each user calls `release` at the end."""
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

    @property
    def writable(self) -> bool:
        """Whether this user may write to folder and database; True if there is no database yet."""
        return not os.path.exists(self.path / DATABASE) or _may_write(self.path)

    @contextmanager
    def reading(self, timeout: float = lock.DEFAULT_TIMEOUT) -> Iterator[ClientAPI | SqliteClient | None]:
        """A client to read with while no other process writes; None if nothing was ever written.

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
        """Like `reading`, but through SQLite if that is safe: faster for sums and columns over all records."""
        if getattr(self._mine, "client", None) is not None or self._is_shared() or not (self.path / DATABASE).exists():
            with self.reading(timeout) as client:
                yield client
            return
        with lock.reader(self.path, timeout) as handle:
            # A writer that was killed leaves a journal, which only an engine can undo: reading here may not write.
            yield self._readable(handle) if (self.path / JOURNAL).exists() else self.sqlite()

    @contextmanager
    def alone(self, timeout: float = lock.DEFAULT_TIMEOUT) -> Iterator[None]:
        """Let no other process read or write, with no engine of this library open on the files.

        Raises:
            StoreLockedError: others wrote for longer than `timeout` seconds, or a Chroma server runs on the folder.
            StoreWriteError: the folder or its database is read-only.
        """
        if not self.writable:
            raise StoreWriteError(
                f"cannot write to the store {self.path}: this user may not write to the folder or to {DATABASE} in it: "
                "change their permissions"
            )
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
                # Before the first write, so that readers reopen their engines even if this process is killed.
                self._generation = secrets.token_bytes(_TOKEN)
                _write_token(handle, self._generation)
            yield

    @contextmanager
    def writing(
        self, timeout: float = lock.DEFAULT_TIMEOUT, before: Callable[[], object] | None = None
    ) -> Iterator[ClientAPI]:
        """A client for exclusive writing: opened after taking the lock, and so as new as the files.

        First undoes what an interrupted vacuum left.

        Args:
            timeout: see `alone`, also for the errors.
            before: called after taking the lock and before opening the client.
        """
        if (mine := getattr(self._mine, "client", None)) is not None:
            yield mine
            return
        with self.alone(timeout):
            if before is not None:
                before()
            client = self.reopened()
            try:
                unfinished.undo(client, self.path)
                yield client
            finally:
                self._mine.client = None

    def reopened(self) -> ClientAPI:
        """Inside `writing`: a new client in place of the one that it gave."""
        with self._mutex:
            self._close()
            self._engine = self._mine.client = self._opened()
            return self._engine

    def sqlite(self) -> SqliteClient:
        """A client that reads records through SQLite alone."""
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
        """Whether the app has its own engine open on the folder in this process."""
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
            # Chroma keeps an engine that failed to start, and would return it to the next caller.
            SharedSystemClient._identifier_to_system.pop(self._spelling, None)
            raise StoreError(
                f"Chroma cannot open {self.path} ({error}): check that it is a Chroma folder and that the installed "
                "Chroma reads its version, or restore it from a backup"
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
    """The process id of a Chroma server on this machine that keeps its files in the folder; None if none is found.

    Finds only servers whose process this user may inspect: an idle Chroma server holds no lock.
    """
    database = str(folder / DATABASE)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if ("chroma", "run") not in zip((Path(word).stem for word in words), words[1:], strict=False):
            continue
        with suppress(psutil.Error):  # the process ended, or is another user's
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
