"""One writer to a store's folder at a time; readers need no lock.

Chroma writes its folder from one process well; with two, records were lost (553 of 1,600 embeddings).
"""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from ctx_compress_rag.errors import StoreLockedError

LOCK_FILE = "ctx-compress.lock"


class WriterLock:
    """The right to write to a folder: taken at the first write, kept until `release` or the process ends.

    Stores of one process share it. The operating system frees it when the process dies, however it dies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # A singleton counts who holds it in this process; not thread-local, since stores are shared by threads.
        self._lock = FileLock(folder.resolve() / LOCK_FILE, timeout=0, thread_local=False, is_singleton=True)
        self._held = False

    def take(self) -> None:
        """Take the lock unless this object has it; StoreLockedError if another process does."""
        if self._held:
            return
        try:
            self._lock.acquire()
        except Timeout as error:
            raise StoreLockedError(
                f"another process is writing to the store {self._folder}: wait until it ends, stop it, or write "
                f"through a server that both use (`chroma run --path {self._folder}` and chromadb.HttpClient)"
            ) from error
        self._held = True

    def release(self) -> None:
        """Give the lock back; without effect where it is not held."""
        if self._held:
            self._held = False
            self._lock.release()
