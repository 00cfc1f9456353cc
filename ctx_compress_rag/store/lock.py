"""Locks on a Chroma folder: one writer at a time, and no reader during a write.

Only one process can safely write a Chroma folder: with two, records were lost, and an engine that opens an index
while another process writes it can crash. Three lock files keep processes apart, for milliseconds at a time:
`ctx-compress.lock` is the writers' queue, `ctx-compress.readers` is shared by readers and excludes writes, and
`ctx-compress.turn` makes new readers wait while a writer waits, so that many readers cannot starve it. The operating
system releases the locks of a process that dies, however it dies.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ctx_compress_rag.errors import StoreLockedError, StoreWriteError

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no shared locks in the standard library: readers take turns
    fcntl = None  # type: ignore[assignment]
    import msvcrt

LOCK_FILE = "ctx-compress.lock"
TURN_FILE = "ctx-compress.turn"
READERS_FILE = "ctx-compress.readers"
DEFAULT_TIMEOUT = 30.0
"""Seconds that a write waits for writes of other processes."""
_POLL = 0.002


@contextmanager
def reader(folder: Path, timeout: float) -> Iterator[int | None]:
    """Hold the lock for reading, which any number can share; yield the descriptor of the readers' file.

    Yields None if this process cannot write to the folder and the file does not exist yet.

    Raises:
        StoreLockedError: one write took longer than `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        with _held(folder / TURN_FILE, deadline, exclusive=False):
            handle = stack.enter_context(_held(folder / READERS_FILE, deadline, exclusive=False))
        yield handle


@contextmanager
def writer(folder: Path, timeout: float) -> Iterator[int]:
    """Hold the lock for writing, exclusively; yield the descriptor of the readers' file.

    Raises:
        StoreLockedError: others held it for `timeout` seconds.
        StoreWriteError: this process cannot write to the folder.
    """
    # A writer waits only for readers that have already started: the caller's limit is for other writers.
    waits = {LOCK_FILE: timeout, TURN_FILE: DEFAULT_TIMEOUT, READERS_FILE: DEFAULT_TIMEOUT}
    with ExitStack() as stack:
        handle: int | None = None
        for name, wait in waits.items():
            handle = stack.enter_context(_held(folder / name, time.monotonic() + wait, exclusive=True))
        assert handle is not None
        yield handle


@contextmanager
def _held(path: Path, deadline: float, *, exclusive: bool) -> Iterator[int | None]:
    handle = _open(path, must_write=exclusive)
    if handle is None:
        yield None
        return
    try:
        _lock(handle, exclusive, deadline, path.parent)
        yield handle
    finally:
        if fcntl:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child shares the lock: closing alone would keep it
        os.close(handle)


def _open(path: Path, *, must_write: bool) -> int | None:
    # Through a symbolic link, the store would write to the link's target.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreWriteError(f"{path} must be a lock file, but is a symbolic link: delete it") from error
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or must_write:
            raise StoreWriteError(
                f"cannot write to the store {path.parent} ({error.strerror}): check that the folder, its files and "
                "the disk are writable"
            ) from error
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreWriteError(f"cannot read {path} ({error.strerror}): check that this user may read it") from error


def _lock(handle: int, exclusive: bool, deadline: float, folder: Path) -> None:
    while True:
        try:
            if fcntl:
                fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            else:  # pragma: no cover
                os.lseek(handle, 1 << 20, os.SEEK_SET)  # past the file's content, which others read
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                raise
        if time.monotonic() >= deadline:
            raise StoreLockedError(
                f"another process is writing to the store {folder}: try again, wait longer (lock_timeout), stop it, "
                f"or write through a server that both use (`chroma run --path {folder}` and chromadb.HttpClient)"
            )
        time.sleep(_POLL)
