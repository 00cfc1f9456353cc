"""Maintain a store's folder: what `ctx-compress backup`, `repair` and `vacuum` do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from chromadb.config import DEFAULT_DATABASE, DEFAULT_TENANT

from ctx_compress_rag.indexing.index import BUNDLE_KEY, check_there, embedder_of, recorded_store
from ctx_compress_rag.store.backup import back_up
from ctx_compress_rag.store.collection import explained
from ctx_compress_rag.store.folder import Folder
from ctx_compress_rag.store.repair import Embed, Rebuilt, rebuild
from ctx_compress_rag.store.vacuum import vacuum
from ctx_compress_rag.text.passage_vectors import passage_vectors


@dataclass(frozen=True)
class RepairReport:
    """What `repair_store` did.

    Attributes:
        backup: the copy of the folder before the repair.
        rebuilt: what was done with each collection.
        resealed: how many records have a new seal.
        damaged: ids of passages whose records cannot be read.
    """

    backup: Path
    rebuilt: Rebuilt
    resealed: int
    damaged: list[str]


def back_up_store(store: str | Path, target: str | Path) -> None:
    """Copy a store's whole folder, even while others write to it; raises as `back_up` does."""
    with _folder(store) as folder:
        back_up(folder, Path(target))


def vacuum_store(store: str | Path) -> int:
    """Overwrite what was deleted from a folder; returns the bytes freed. Raises as `vacuum` does."""
    with _folder(store) as folder, explained(str(store)):
        return vacuum(folder)


def repair_store(store: str | Path, reseal: bool = False) -> RepairReport:
    """Copy a folder, then rebuild its index from its records.

    Args:
        store: the folder; all soft contexts in it are checked, and the index of `ctx-compress index`.
        reseal: seal records that have no seal of the key in use: see `SoftContextStore.reseal`.

    Raises:
        StoreError: there is no store, its SQLite file cannot be read, or there is no room for the copy.
        StoreLockedError: others wrote for too long, or a Chroma server runs on the folder.
    """
    names = (Path(f"{Path(store).resolve()}.before-repair-{number}") for number in count(1))
    backup = next(name for name in names if not name.exists())
    with _folder(store) as folder:
        rebuilt = rebuild(folder, backup, _embedder)
    resealed, damaged = 0, []
    for collection in rebuilt.companions:
        with recorded_store(store, collection) as opened:
            if reseal:
                resealed += opened.reseal()
            damaged += opened.damaged()
    return RepairReport(backup, rebuilt, resealed, damaged)


def _embedder(metadata: Mapping[str, Any]) -> Embed | None:
    return partial(passage_vectors, embedder=embedder_of(metadata)) if BUNDLE_KEY in metadata else None


@contextmanager
def _folder(store: str | Path) -> Iterator[Folder]:
    check_there(store)
    folder = Folder.of(Path(store), DEFAULT_TENANT, DEFAULT_DATABASE)
    try:
        yield folder
    finally:
        folder.release()
