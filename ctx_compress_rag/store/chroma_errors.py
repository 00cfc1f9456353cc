"""Turn exceptions of Chroma and its HTTP client into StoreErrors with a remedy, and find faults of the disk."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from chromadb.errors import NotFoundError

from ctx_compress_rag.errors import CtxCompressError, StoreError, StoreWriteError

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
