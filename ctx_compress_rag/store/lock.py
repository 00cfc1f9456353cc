"""Locks on a Chroma folder: one process at a time has its engine at work, and writers have their turn.

Chroma's embedded engine is made for one process: with two writers, records were lost, and an engine that opens an
index while another process writes it can crash. It writes even when it reads. Three lock files keep processes apart,
for milliseconds at a time: `ctx-compress.lock` is the writers' queue, `ctx-compress.access` is held while an engine
works, and `ctx-compress.turn` makes new readers wait while a writer waits, so that many readers cannot starve it. The
operating system releases the locks of a process that dies, however it dies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import filelock

from ctx_compress_rag.errors import StoreLockedError, StoreWriteError

LOCK_FILE = "ctx-compress.lock"
TURN_FILE = "ctx-compress.turn"
ACCESS_FILE = "ctx-compress.access"
DEFAULT_TIMEOUT = 30.0
"""Seconds that a write waits for writes of other processes."""
_POLL = 0.002
_held_here: set[Path] = set()


class FolderLock:
    """The locks on one folder. The threads of a process read together.

    Args:
        folder: the folder, which must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mutex = threading.Lock()
        self._readers = 0
        self._access = ExitStack()

    @contextmanager
    def reading(self, timeout: float) -> Iterator[None]:
        """Keep other processes, and writers of this one, away.

        Raises:
            StoreLockedError: one write took longer than `timeout` seconds.
            StoreWriteError: this user may not write to the folder.
        """
        with _held(self._folder / TURN_FILE, timeout), self._mutex:
            if not self._readers:
                self._access.enter_context(_held(self._folder / ACCESS_FILE, timeout))
            self._readers += 1
        try:
            yield
        finally:
            with self._mutex:
                self._readers -= 1
                if not self._readers:
                    self._access.close()

    @contextmanager
    def writing(self, timeout: float) -> Iterator[None]:
        """Keep everybody else away.

        Raises:
            StoreLockedError: others wrote for `timeout` seconds.
            StoreWriteError: this user may not write to the folder.
        """
        # A writer waits only for readers that have already started: the caller's limit is for other writers.
        waits = {LOCK_FILE: timeout, TURN_FILE: DEFAULT_TIMEOUT, ACCESS_FILE: DEFAULT_TIMEOUT}
        with ExitStack() as stack:
            for name, seconds in waits.items():
                stack.enter_context(_held(self._folder / name, seconds))
            yield


@contextmanager
def _held(path: Path, timeout: float) -> Iterator[None]:
    lock = filelock.FileLock(path, timeout=timeout, poll_interval=_POLL, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        who = "another thread of this very process" if path in _held_here else "another process"
        raise StoreLockedError(
            f"{who} is writing to the store {path.parent}: try again, wait longer (lock_timeout), stop it, or write "
            f"through a server that both use (`chroma run --path {path.parent}` and chromadb.HttpClient)"
        ) from None
    except OSError as error:
        raise StoreWriteError(
            f"cannot write {path} ({error.strerror}), and Chroma must write even to read: check that the folder, its "
            "files and the disk are writable, or let their owner run a server (`chroma run --path "
            f"{path.parent}`) and give chromadb.HttpClient(...)"
        ) from error
    _held_here.add(path)
    try:
        yield
    finally:
        _held_here.discard(path)
        lock.release()
