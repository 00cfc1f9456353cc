"""A Chroma folder that several processes use: this library's own engine, never older than the last write.

Chroma keeps part of the index in memory and sometimes writes it over the files, even while reading. So an engine
that was opened before another process's write would undo that write. Therefore each write takes the lock, opens a
new engine and leaves a new generation number; a reader that finds a new number reopens its engine.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ctx_compress_rag.errors import StoreError, StoreWriteError
from ctx_compress_rag.store import lock
from ctx_compress_rag.store.chroma import Chroma, explained, lacks_room
from ctx_compress_rag.store.chroma_internals import has_database, open_engine

_GENERATION_FILE = "ctx-compress.generation"
_NOT_COPIED = (lock.LOCK_FILE, lock.TURN_FILE, lock.ACCESS_FILE)


class Folder:
    """A folder's engine in this process, shared by the stores on it. Call every method as `uninterrupted`.

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
        self._engine: Chroma | None = None
        self._generation = b""
        self._lock = lock.FolderLock(path)
        self._mutex = threading.Lock()

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

    @contextmanager
    def reading(self, timeout: float) -> Iterator[Chroma | None]:
        """A client to read with while no other process writes; None if nothing was ever written.

        Raises:
            StoreLockedError: a single write of another process took longer than `timeout` seconds.
            StoreWriteError: this user may not write to the folder, as Chroma must even to read.
            StoreError: Chroma cannot open the folder.
        """
        if not has_database(self.path):
            yield None
            return
        with self._lock.reading(timeout):
            with self._mutex:
                generation = self._read_generation()
                if self._engine is None or generation != self._generation:
                    self._reopen(generation)
                engine = self._engine
            try:
                yield engine
            except StoreWriteError:
                with self._mutex:
                    if self._engine is engine:
                        self._close()  # after a read that failed on a full disk, it hangs at the next, even with room
                raise

    @contextmanager
    def writing(self, timeout: float) -> Iterator[Chroma]:
        """A client for exclusive writing: opened after taking the lock, and so as new as the files.

        Raises:
            StoreLockedError: others wrote for longer than `timeout` seconds.
            StoreWriteError: the folder or its disk cannot be written to.
            StoreError: Chroma cannot open the folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreWriteError(f"cannot make the folder {self.path} ({error.strerror}): give another") from error
        with self._lock.writing(timeout), self._mutex:
            if fault := lacks_room(self.path):
                # Not only after Chroma has failed: what it then cannot apply, it tries to apply before each read.
                raise StoreWriteError(f"cannot write to {self.path} ({fault}): make room")
            # Before the first write, so that readers reopen their engines even if this process is killed.
            generation = secrets.token_bytes(8)
            self._close()
            self._write_generation(generation)
            self._reopen(generation)
            assert self._engine is not None
            try:
                yield self._engine
            except BaseException:
                self._close()  # an engine whose write failed, on a full disk, may fail at reads, too
                raise

    def back_up(self, target: Path, timeout: float = lock.DEFAULT_TIMEOUT) -> None:
        """Copy the folder, including its key, while no store writes to it. The copy is a normal store folder.

        Args:
            target: where to put the copy; must not exist, and is created completely or not at all.
            timeout: seconds to wait for writers.

        Raises:
            StoreError: the target exists, is inside the folder or cannot be written.
            StoreLockedError: others wrote for too long.
        """
        if target.exists() or target.resolve().is_relative_to(self.path):
            raise StoreError(f"cannot copy to {str(target)!r}: give a folder outside the store that does not exist yet")
        draft: Path | None = None
        with self._lock.writing(timeout), self._mutex:
            self._close()
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
                shutil.copytree(self.path, draft, ignore=shutil.ignore_patterns(*_NOT_COPIED), dirs_exist_ok=True)
                draft.rename(target)
            except (OSError, shutil.Error) as error:
                raise StoreError(
                    f"cannot copy {self.path} to {str(target)!r} ({error}): check that the disk has room"
                ) from error
            finally:
                if draft is not None:
                    shutil.rmtree(draft, ignore_errors=True)

    def _reopen(self, generation: bytes) -> None:
        self._close()
        with explained(str(self.path), self.path):
            engine = open_engine(self._spelling, self._tenant, self._database)
        self._engine, self._generation = Chroma(engine, str(self.path), self.path), generation

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _read_generation(self) -> bytes:
        try:
            return (self.path / _GENERATION_FILE).read_bytes()
        except FileNotFoundError:
            return b""

    def _write_generation(self, generation: bytes) -> None:
        path = self.path / _GENERATION_FILE
        try:
            # A link in its place is not followed: who may write to the folder could have any file overwritten.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                os.write(handle, generation)
            finally:
                os.close(handle)
        except OSError as error:
            raise StoreWriteError(f"cannot write {path} ({error.strerror}): check the folder and its disk") from error
