"""The place of a store, which is a Chroma server, memory, or a folder that several processes use.

In a folder, only one Chroma engine of all processes and threads works at a time, because each read or write holds the
folder's locks, for milliseconds. Without that, two writers lost records. Chroma writes even when it reads, and an
engine keeps part of the index in memory, which it may write over what others wrote after it was opened. Therefore each
write opens a new engine and leaves a new generation number, and a process that finds a new number reopens its engine.
The operating system releases the locks of a process that dies, however it dies. The byte after the number says whether
a write was not finished.
"""

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import chromadb
import filelock
import httpx
from chromadb.api import ClientAPI
from chromadb.api.client import Client
from chromadb.config import DEFAULT_DATABASE, DEFAULT_TENANT
from chromadb.errors import NotFoundError

from ctx_compress_rag.drafts import draft
from ctx_compress_rag.errors import ConfigError, CtxCompressError, StoreError, StoreLockedError, StoreWriteError
from ctx_compress_rag.store.chroma_internals import (
    check_chroma_not_forked,
    chroma_client,
    chroma_settings,
    drop_cut_indexes,
    has_chroma_database,
    open_chroma_engine,
)
from ctx_compress_rag.store.threads import limit_wait, shielded_from_interrupts

_ROOM = 32 << 20
"""Bytes that must be free before a write, twice what Chroma was measured to need for this library's largest write."""
_PROBE_BYTES = 1 << 20


@contextmanager
def raising_store_errors(where: str, folder: Path | None = None, *, writing: bool = False) -> Iterator[None]:
    """Turn errors of Chroma or HTTP into StoreError, or StoreWriteError if `writing` or if `folder` is not writable."""
    try:
        yield
    except (CtxCompressError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except httpx.TransportError as error:
        said = f"{type(error).__name__}: {error}"
        raise StoreError(f"{where} does not answer ({said}): check that it runs and can be reached") from error
    except NotFoundError as error:
        raise StoreError(f"a collection in {where} is gone ({error}): open the store, or index, again") from error
    except BaseException as error:  # a panic of Chroma's Rust part is not an Exception
        said = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        if fault := folder and disk_fault(folder):
            raise StoreWriteError(f"cannot write to {where} ({fault}; {said}): make room, or permit writing") from error
        remedy = "restore a backup, or index into a new folder" if folder else "read the server's log"
        kind = StoreWriteError if writing else StoreError
        raise kind(f"Chroma failed on {where} ({said}): try again; if it fails again, {remedy}") from error


def disk_lacks_room(folder: Path) -> str | None:
    """Return an explanation if less than 32 MiB of the folder's disk are free, else None."""
    free = shutil.disk_usage(folder).free
    return f"its disk has {free:,} bytes left" if free < _ROOM else None


def disk_fault(folder: Path) -> str | None:
    """Return why nothing can be written to the folder, or None if writing is possible."""
    try:
        if fault := disk_lacks_room(folder):
            return fault
        if closed := [path.name for path in folder.iterdir() if not os.access(path, os.W_OK)]:
            return f"this user may not write to {closed[0]} in it"
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


DEFAULT_TIMEOUT = 30.0  # seconds that a write waits for other writes
READ_TIMEOUT = 60.0  # seconds that a read waits for a write in progress, and as many for Chroma's answer
LOCK_FILE = "ctx-compress.lock"  # the lock file at which writers wait for each other
TURN_FILE = "ctx-compress.turn"
"""The lock file at which new readers wait while a writer waits for earlier ones, so that readers cannot starve it."""
ACCESS_FILE = "ctx-compress.access"  # the lock file that is held while an engine works
DRAFT = ".draft"  # the suffix of a file's name while the file is being written
_GENERATION_FILE = "ctx-compress.generation"
_UNFINISHED, _FINISHED = b"w", b"."  # what ends a generation number
_POLL = 0.002
_LONGEST = 512
_NAME = re.compile(rf"[a-zA-Z0-9][a-zA-Z0-9._-]{{1,{_LONGEST - 2}}}[a-zA-Z0-9]")  # Chroma's rule
Location = str | os.PathLike[str] | ClientAPI | chromadb.Collection


class StorePlace:
    """The place of Chroma collections: a server, or memory, used through the app's own client.

    Use its context managers only within `shielded_from_interrupts` calls.
    """

    where: str  # the address, for messages
    remote = False  # whether it is on a server, so that other machines may use it, too
    folder: Path | None = None

    def __init__(self, client: ClientAPI) -> None:
        settings = client.get_settings()
        host = settings.chroma_server_host
        self.remote = bool(host)
        self.where = f"the Chroma server {host}:{settings.chroma_server_http_port}" if host else "memory"
        if not host:
            check_chroma_not_forked()  # an engine in memory
        self._client = client

    @contextmanager
    def reading(self, timeout: float) -> Iterator[ClientAPI | None]:
        """Give a client to read with, or None if nothing was ever written.

        Raises StoreLockedError after `timeout` seconds of waiting for locks, StoreError after as many for Chroma, and
        StoreWriteError if this user may not write to the folder, as Chroma must even to read.
        """
        with limit_wait(timeout, partial(self._silent, timeout)), raising_store_errors(self.where):
            yield self._client

    @contextmanager
    def writing(self, timeout: float) -> Iterator[ClientAPI]:
        """Give a client to write with; raise StoreWriteError, or StoreLockedError after waiting `timeout` seconds."""
        with raising_store_errors(self.where, writing=True):
            yield self._client

    def check_writable(self, timeout: float) -> None:
        """Raise the error that `writing` would, and create a missing folder with its lock files, but no store."""

    def close(self) -> None:
        """Close the Chroma engine that this library opened."""

    def interrupted(self) -> bool:
        """Whether a write was not finished, so that Chroma's index may lack records. Ask only while `reading`."""
        return False

    def generation(self) -> bytes:
        """Return a value that changes with each write, b"" if it is unknown. Ask only while `reading`."""
        return b""

    def mended(self) -> None:
        """Record, outside `reading` and `writing`, that Chroma's index lacks no record; `interrupted` turns False."""

    def disk_bytes(self) -> int | None:
        """Return the size of all files in bytes, or None if the place is not a folder."""
        return None

    def _silent(self, seconds: float) -> StoreError:
        fault = disk_fault(self.folder) if self.folder is not None else None
        return (StoreWriteError if fault else StoreError)(
            f"{self.where} has not answered for {seconds:g} seconds{f' ({fault})' if fault else ''}: check that its "
            "disk has room and that nothing holds it up, then restart this process, which may keep the folder locked; "
            "or wait longer (read_timeout)"
        )


class StoreFolder(StorePlace):
    """A Chroma folder, used through an engine of this library, which is never older than the folder's last write."""

    folder: Path

    def __init__(self, path: Path, tenant: str = DEFAULT_TENANT, database: str = DEFAULT_DATABASE) -> None:
        check_chroma_not_forked()
        self.where, self.folder = str(path), path.resolve()
        self._tenant, self._database = tenant, database
        self._engine: Client | None = None
        self._generation = b""
        if not has_chroma_database(path):
            above = next(str(each) for each in (path.absolute(), *path.absolute().parents) if os.path.exists(each))
            if not os.access(above, os.W_OK):
                raise StoreWriteError(
                    f"there is no store in {path} that this user can read, and none can be made because this user may "
                    f"not write to {above}: change its permissions, or give another folder"
                )

    @contextmanager
    def reading(self, timeout: float) -> Iterator[ClientAPI | None]:
        if not has_chroma_database(self.folder):
            yield None
            return
        with limit_wait(2 * timeout, partial(self._silent, timeout)), self._shared(timeout):
            generation = self.generation()
            try:
                with raising_store_errors(self.where, self.folder):
                    if self._engine is None or generation != self._generation:
                        self._reopen(generation, self.interrupted())
                    yield self._engine
            except StoreWriteError:
                self.close()  # after a read that failed on a full disk, it hangs at the next, even with room
                raise

    @contextmanager
    def writing(self, timeout: float) -> Iterator[ClientAPI]:
        with self._writable(timeout):
            # Before the first write, so that readers reopen their engines even if this process is killed.
            generation, interrupted = secrets.token_bytes(8), self.interrupted()
            self._write_generation(generation + _UNFINISHED)
            with raising_store_errors(self.where, self.folder, writing=True):
                self._reopen(generation, interrupted)
                assert self._engine is not None
                yield self._engine
            self._write_generation(generation + (_UNFINISHED if interrupted else _FINISHED))

    def check_writable(self, timeout: float) -> None:
        with self._writable(timeout):
            pass

    @shielded_from_interrupts
    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def interrupted(self) -> bool:
        return self._read_generation().endswith(_UNFINISHED)

    def generation(self) -> bytes:
        return self._read_generation()[:-1]

    def disk_bytes(self) -> int:
        size = 0
        for file in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # SQLite's journal comes and goes
                size += file.stat().st_size if file.is_file() else 0
        return size

    @shielded_from_interrupts
    def mended(self) -> None:
        with self._alone(DEFAULT_TIMEOUT):
            self._write_generation(self._read_generation()[:-1] + _FINISHED)

    @shielded_from_interrupts
    def back_up(self, target: Path, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Copy the folder, with its key, to `target`, completely or not at all. Writers wait meanwhile.

        Raises StoreError if `target` exists or cannot be written, StoreLockedError after `timeout` seconds of waiting.
        """
        if target.exists() or target.resolve().is_relative_to(self.folder):
            raise StoreError(f"cannot copy to {str(target)!r}: give a folder outside the store that does not exist yet")
        with self._alone(timeout):
            self.close()
            left_out = shutil.ignore_patterns(LOCK_FILE, TURN_FILE, ACCESS_FILE, f"*{DRAFT}")
            try:
                with draft(target) as copy:
                    shutil.copytree(self.folder, copy, ignore=left_out)
            except (OSError, shutil.Error) as error:
                raise StoreError(f"cannot copy {self.where} to {str(target)!r} ({error}): check its disk") from error

    @contextmanager
    def _shared(self, timeout: float) -> Iterator[None]:
        with ExitStack() as access:
            with lock_store_folder(self.folder / TURN_FILE, timeout):
                access.enter_context(lock_store_folder(self.folder / ACCESS_FILE, timeout))
            yield

    @contextmanager
    def _writable(self, timeout: float) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreWriteError(f"cannot make the folder {self.where} ({error.strerror}): give another") from error
        with self._alone(timeout):
            if fault := disk_lacks_room(self.folder):
                # Before Chroma fails: an entry that it cannot apply is tried again before each read.
                raise StoreWriteError(f"cannot write to {self.where} ({fault}): make room")
            yield

    @contextmanager
    def _alone(self, timeout: float) -> Iterator[None]:
        # The caller's limit is for other writers: the readers before it are soon done.
        queue, turn, access = (self.folder / name for name in (LOCK_FILE, TURN_FILE, ACCESS_FILE))
        with lock_store_folder(queue, timeout), lock_store_folder(turn), lock_store_folder(access):
            yield

    def _reopen(self, generation: bytes, interrupted: bool) -> None:
        self.close()
        if interrupted:
            drop_cut_indexes(self.folder)
        self._engine, self._generation = open_chroma_engine(self.folder, self._tenant, self._database), generation

    def _read_generation(self) -> bytes:
        try:
            return (self.folder / _GENERATION_FILE).read_bytes()
        except FileNotFoundError:
            return b""

    def _write_generation(self, generation: bytes) -> None:
        path = self.folder / _GENERATION_FILE
        try:
            # A link in its place is not followed: who may write to the folder could have any file overwritten.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                os.write(handle, generation)
            finally:
                os.close(handle)
        except OSError as error:
            raise StoreWriteError(f"cannot write {path} ({error.strerror}): check the folder and its disk") from error


@contextmanager
def lock_store_folder(file: Path, timeout: float = DEFAULT_TIMEOUT) -> Iterator[None]:
    """Hold the lock `file` of a folder during the block. Raise StoreLockedError after `timeout` seconds of waiting."""
    # A new object each time: one that is shared lets every thread in.
    lock = filelock.FileLock(file, timeout=timeout, poll_interval=_POLL, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise StoreLockedError(
            f"another process, or another thread of this one, has been reading or writing in {file.parent} for "
            f"{timeout:g} seconds: try again, wait longer (lock_timeout, read_timeout), stop it, or use a server for "
            f"all (`chroma run --path {file.parent}` and chromadb.HttpClient)"
        ) from None
    except OSError as error:
        raise StoreWriteError(
            f"cannot write {file} ({error.strerror}), and Chroma must write even to read: check that the folder, its "
            f"files and the disk are writable, or let their owner run a server (`chroma run --path {file.parent}`) and "
            "give chromadb.HttpClient(...)"
        ) from error
    try:
        yield
    finally:
        lock.release()


def connect_store(location: Location | StorePlace) -> StorePlace:
    """Return the place that a path, a Chroma client or a collection stands for. A client of a folder gives the folder.

    Nothing is created. Raises ConfigError for anything else, such as an asynchronous client, StoreError for a file.
    """
    if isinstance(location, StorePlace):
        return location
    if isinstance(location, ClientAPI | chromadb.Collection):
        settings = chroma_settings(location)
        if settings.is_persistent and not settings.chroma_server_host:
            return StoreFolder(Path(settings.persist_directory), location.tenant, location.database)
        return StorePlace(chroma_client(location) if isinstance(location, chromadb.Collection) else location)
    if not isinstance(location, str | os.PathLike):
        raise ConfigError(
            f"cannot keep a store in {type(location).__name__}: give a folder, a chromadb client (HttpClient, "
            "PersistentClient, EphemeralClient) or a collection; asynchronous ones are not supported"
        )
    path = os.fspath(location)
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise StoreError(f"a store needs a folder, and {path!r} is not one")
    check_store_folder_name(path)
    return StoreFolder(Path(path))


def companion_collection(location: object, collection: str) -> str:
    """Add `-ctx` to the name of `location`, if a collection, else to `collection`. Raise ConfigError for a bad name."""
    if isinstance(location, chromadb.Collection):
        check_app_collection(location)
        collection = location.name
    if not isinstance(collection, str) or not _NAME.fullmatch(name := f"{collection}-ctx"):
        raise ConfigError(
            f"collection={collection!r}: give a name of at most {_LONGEST - len('-ctx')} letters, digits, '.', '_' and "
            "'-' that starts with a letter or digit; to give a collection itself, use it as the location"
        )
    return name


def check_app_collection(collection: chromadb.Collection) -> None:
    if "ctx_format" in (collection.metadata or {}):
        raise ConfigError(f"{collection.name!r} holds soft contexts itself: give the app's own collection")


def check_store_folder_name(folder: str) -> None:
    """Raise StoreError for a folder whose name is not UTF-8, because Chroma cannot open it."""
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise StoreError(f"Chroma cannot use {folder!r}, whose name is not UTF-8: rename it, or give another") from None
