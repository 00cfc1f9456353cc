"""A folder as an app has it, passages to retrieve and their soft contexts, and processes that work on it.

The parent never opens Chroma: each job is done in a child of its own, which may die.
"""

import logging
import os
import pickle
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.crashes.words import WORDS, passage
from ctx_compress_rag.errors import CtxCompressError, StoreError
from ctx_compress_rag.marking.mark import expand, mark_texts
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.collection import ChromaCollection
from ctx_compress_rag.store.place import connect_store

logger = logging.getLogger(__name__)

COLLECTION, KEY, TENANT = "passages", b"a key for the campaign", "a tenant"
KEPT, MOVED = range(6, 206), range(6)  # passages that jobs leave alone, and those that they change or delete
THEIRS = range(400, 406)  # passages of a tenant, in a second collection, under ids of the first
FIRST = (
    110  # how many go into a new folder at once: the others wait for more, until Chroma writes its index to the disk
)
INDEXED: Any = {"hnsw": {"sync_threshold": 100, "batch_size": 100}}  # as it does after so many


def text_of(n: int, version: int = 0) -> str:
    """A version of the n-th passage."""
    return passage(n) + f" version{version}" * (1 + version)


def in_child(work: Callable[[], Any], seconds: float = 120) -> tuple[int, Any]:
    """How a forked child ended (0, or minus a signal), and what `work` returned in it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(seconds))
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(work(), pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, pickle.loads(said) if code == 0 else None


def vectors_of(ids: Sequence[str]) -> list[list[float]]:
    """A vector for each passage, nearest to itself."""
    drawn = [np.random.default_rng(int(id[1:])).normal(size=16) for id in ids]
    return [list(map(float, each / np.linalg.norm(each))) for each in drawn]


@contextmanager
def app_collection(folder: Path) -> Iterator[ChromaCollection]:
    """The app's collection, to retrieve from."""
    with closing(connect_store(folder)) as place:
        yield ChromaCollection(place, COLLECTION, INDEXED)


def save(folder: Path, passages: dict[str, str], store: SoftContextStore) -> None:
    """As an app does it: vectors first, then soft contexts."""
    with app_collection(folder) as app:
        app.upsert(list(passages), vectors_of(list(passages)), [{"n": 1}] * len(passages), list(passages.values()))
    store.add(list(passages.values()), list(passages), progress=False)


def drop(folder: Path, ids: Sequence[str], store: SoftContextStore) -> None:
    """Soft contexts first, then vectors."""
    store.delete(ids)
    with app_collection(folder) as app:
        app.delete(ids)


def searched(folder: Path, found: Counter[str]) -> dict[str, str]:
    """The app's passages by id, those that search misses counted, and put back as an app does it."""
    with app_collection(folder) as app:
        there = {id: text for id, (text, _) in app.texts(app.ids()).items() if text is not None}
        if not there:
            raise StoreError("the database is gone")
        said = app.interrupted()
        missed = set(there) - {hit[0] for [hit] in app.query(vectors_of(list(there)), 1)}
        found["missed"] += len(missed)
        found["missed unsaid"] += 0 if said else len(missed)
        if lost := [id for id in app.unsearchable() if id in there]:
            app.upsert(lost, vectors_of(lost), [{"n": 1}] * len(lost), [there[id] for id in lost])
        missed = set(there) - {hit[0] for [hit] in app.query(vectors_of(list(there)), 1)}
        found["not searchable again"] += len(missed)
        return there


def make(folder: Path) -> None:
    """The folder that all jobs begin with."""
    with SoftContextStore(folder, WORDS, key=KEY) as store:
        passages = [*MOVED, *KEPT]
        for part in (passages[:FIRST], passages[FIRST:]):
            save(folder, {f"p{n}": text_of(n) for n in part}, store)
    with second(folder) as store:
        store.add([text_of(n) for n in THEIRS], [f"p{n - 400}" for n in THEIRS], progress=False)


def second(folder: Path) -> SoftContextStore:
    """A tenant's store in the same folder."""
    return SoftContextStore(folder, WORDS, key=KEY, collection="second", scope=TENANT)


def job(folder: Path, kind: str) -> None:
    """Add passages, change the text of some, or delete some."""
    with SoftContextStore(folder, WORDS, key=KEY) as store:
        if kind == "delete":
            drop(folder, [f"p{n}" for n in MOVED], store)
        else:
            first = 300 if kind == "add" else 0
            save(folder, {f"p{first + n}": text_of(first + n, 1) for n in MOVED}, store)


def look(folder: Path) -> Counter[str]:
    """What a reader meets: every passage that can be retrieved, as the app's collection has it."""
    found: Counter[str] = Counter()
    with SoftContextStore(folder, WORDS, key=KEY) as store:
        there = searched(folder, found)
        ids, texts = list(there), list(there.values())
        shown = mark_texts(store, texts, ids, ratio=8, on_missing="text")
        for text, each in zip(texts, shown, strict=True):
            if each == text:
                found["missing"] += 1
                continue
            [marker] = store.split(each)
            assert not isinstance(marker, str)
            found["read"] += 1
            found["wrong"] += not is_of(store.read([marker])[0].soft, text) or expand(store, each) != text
        found["lost"] += len({f"p{n}" for n in KEPT} - set(ids))
        softs = store.get([f"p{n}" for n in KEPT])
        with second(folder) as theirs:
            softs += theirs.get([f"p{n - 400}" for n in THEIRS])
            found["of others"] += len(theirs.ids("default")) + len(store.ids(TENANT))
        for soft, n in zip(softs, [*KEPT, *THEIRS], strict=True):
            found["lost"] += soft is None or not is_of(soft.merge(2), text_of(n))
        found["not mended"] += sum(
            new == text for text, new in zip(texts, mark_texts(store, texts, ids, ratio=8), strict=True)
        )
    return found


def is_of(soft: Any, text: str) -> bool:
    """Whether the slots, merged by two, were made of the text."""
    expected = WORDS.at(text, 8)
    if soft.token_counts.tolist() != expected.token_counts.tolist():
        return False
    return bool(np.linalg.norm(soft.slots - expected.slots) < 0.02 * np.linalg.norm(expected.slots))


def looked_at(folder: Path) -> Counter[str]:
    """`look`, where the library's own errors, other exceptions and crashes are counted, too."""

    def safely() -> Counter[str]:
        try:
            return look(folder)
        except CtxCompressError as error:
            logger.warning("refused: %.300s", error)
            return Counter(refused=1)
        except BaseException as error:
            logger.warning("raw error: %.300r", error)
            return Counter({"raw errors": 1})

    code, found = in_child(safely)
    if code:
        logger.warning("a reader ended with %d", code)
    return Counter({"aborts" if code == -signal.SIGABRT else "crashes": 1}) if code else found


@contextmanager
def copies() -> Iterator[Callable[[], Path]]:
    """Gives fresh copies of one folder, each in the place of the last."""
    with tempfile.TemporaryDirectory() as place:
        base, copy = Path(place, "base"), Path(place, "copy")
        assert in_child(lambda: make(base))[0] == 0

        def fresh() -> Path:
            shutil.rmtree(copy, ignore_errors=True)
            return Path(shutil.copytree(base, copy))

        yield fresh
