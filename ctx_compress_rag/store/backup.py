"""A consistent copy of a store's folder, however busy its writers are."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from ctx_compress_rag.errors import StoreError
from ctx_compress_rag.store import lock
from ctx_compress_rag.store.folder import Folder
from ctx_compress_rag.store.sqlite import DATABASE

_NOT_COPIED = (f"{DATABASE}*", lock.LOCK_FILE, lock.TURN_FILE, lock.READERS_FILE)


def back_up(folder: Folder, target: Path) -> None:
    """Copy a folder, including its key, while nobody writes. The copy is a normal store folder.

    Args:
        folder: the folder to copy.
        target: where to put the copy; must not exist, and is created completely or not at all.

    Raises:
        StoreError: the target exists, is inside the folder or cannot be written, or SQLite finds the database damaged.
        StoreLockedError: others wrote for too long, or a Chroma server runs on the folder.
    """
    with folder.alone():
        copy(folder.path, target)


def copy(folder: Path, target: Path) -> None:
    """Like `back_up`, for callers that hold the folder's lock."""
    if target.exists() or target.resolve().is_relative_to(folder):
        raise StoreError(f"cannot copy to {str(target)!r}: give a folder outside the store that does not exist yet")
    draft: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        shutil.copytree(folder, draft, ignore=shutil.ignore_patterns(*_NOT_COPIED), dirs_exist_ok=True)
        with (
            closing(sqlite3.connect(folder / DATABASE)) as source,
            closing(sqlite3.connect(draft / DATABASE)) as copied,
        ):
            source.backup(copied)
            if (found := copied.execute("pragma quick_check(1)").fetchone()[0]) != "ok":
                raise StoreError(
                    f"{folder / DATABASE} is damaged ({found}), and Chroma may crash on it: "
                    "restore a backup, or index again into a new folder"
                )
        draft.rename(target)
    except (OSError, shutil.Error, sqlite3.Error) as error:
        raise StoreError(
            f"cannot copy {folder} to {str(target)!r} ({error}): check that the disk has room; if the database is "
            "malformed, restore a backup, or index again into a new folder"
        ) from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
