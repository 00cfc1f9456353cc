"""Passages that Chroma stores but cannot find, since its index lost them when a process was killed."""

import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import pytest

from ctx_compress_rag import Bundle, SoftContextStore
from ctx_compress_rag.errors import StoreError
from ctx_compress_rag.indexing.index import COLLECTION, PassageCollection, PassageIndex, make_index_passage, open_index
from ctx_compress_rag.models.sentence_embedding import PACKAGED, embed_passages
from ctx_compress_rag.store.collection import ChromaCollection
from ctx_compress_rag.store.place import StoreFolder
from helpers.store import WordBundle, passage

QUICK: Any = {"hnsw": {"space": "cosine", "sync_threshold": 10, "batch_size": 10}}
"""An index that reaches the disk after ten records."""


def lose(folder: Path, add: Callable[[int, int], None]) -> None:
    """Add 10 records, then 10 more of which the index on disk knows nothing, as after a kill."""
    add(0, 10)
    [index] = [path for path in folder.iterdir() if path.is_dir()]
    before = Path(shutil.copytree(index, folder.parent / "before"))
    add(10, 20)
    shutil.rmtree(index)
    shutil.copytree(before, index)


def collection(folder: Path, name: str, metadata: Any = None) -> tuple[Any, chromadb.Collection]:
    client = chromadb.PersistentClient(str(folder))
    found = client.get_or_create_collection(name, configuration=QUICK, metadata=metadata, embedding_function=None)
    return client, found


def test_an_index_puts_them_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "chroma"
    passages = [make_index_passage(passage(n, 6), f"file{n}.txt", "/docs") for n in range(20)]

    def add(start: int, end: int) -> None:
        client, raw = collection(folder, COLLECTION, {"ctx_bundle": "words", "ctx_embedder": PACKAGED})
        some = passages[start:end]
        texts = [each.text for each in some]
        raw.upsert([str(p.id) for p in some], embed_passages(texts), [dict(p.metadata) for p in some], texts)
        raw.query(query_embeddings=embed_passages(texts[:1]), n_results=1)
        client.close()

    lose(folder, add)
    bundle: Any = WordBundle()
    with suppress(StoreError), StoreFolder(folder).writing(10):
        raise StoreError("as if the process were killed")
    with PassageIndex(StoreFolder(folder), bundle, "words", None, PACKAGED) as index:
        assert index.interrupted
        lost = index.mend()
        assert sorted(lost) == sorted(str(each.id) for each in passages[10:])
        for [hit], each in zip(index.search([each.text for each in passages], 1), passages, strict=True):
            assert (hit.id, hit.source) == (each.id, each.metadata["source"])
        assert index.mend() == [] and not index.interrupted


def test_an_index_is_mended_when_it_is_opened(index: PassageIndex, tmp_path: Path) -> None:
    list(index.add([make_index_passage("A passage of some words.", "file.txt", "/docs")]))
    with suppress(StoreError), StoreFolder(tmp_path / "chroma").writing(10):
        raise StoreError("as if the process were killed")
    with open_index(tmp_path / "chroma") as opened:
        assert not opened.interrupted
    with open_index(tmp_path / "chroma") as again:
        assert not again.interrupted


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("cut", ["before all", "in a number", "after a dot"])  # a dot ends a pickle, too
def test_an_index_file_that_a_kill_cut_is_begun_anew(tmp_path: Path, cut: str, killed: bool) -> None:
    """Of a write that nobody says was interrupted, as of an app's, the file stays, and the error says what to do."""
    folder = tmp_path / "chroma"
    vectors = np.eye(10).tolist()
    ids = [f"p.{n}" for n in range(10)]
    for name in ("cut", "whole"):
        with closing(ChromaCollection(StoreFolder(folder), name, QUICK)) as made:
            made.upsert(ids, vectors, [{"n": 1}] * 10, ids)
            made.query(vectors[:1], 1)
        if name == "cut":
            [file] = folder.glob("*/index_metadata.pickle")
    others = {path: path.read_bytes() for path in folder.glob("*/*.pickle") if path != file}
    content = file.read_bytes()
    left = {"before all": 0, "in a number": 40, "after a dot": content.index(b"p.") + 2}[cut]
    file.write_bytes(content[:left])
    if killed:
        with suppress(StoreError), StoreFolder(folder).writing(10):
            raise StoreError("as if the process were killed")
    with closing(ChromaCollection(StoreFolder(folder), "cut", QUICK)) as found:
        if not killed:
            with pytest.raises(StoreError, match="restore a backup"):
                found.query(vectors, 1)
            assert file.stat().st_size == left
            return
        assert list(found.texts(ids)) == ids and found.interrupted()
        hits = {hit[0] for [hit] in found.query(vectors, 1)}
        assert set(found.unsearchable()) == set(ids) - hits and len(hits) < 10
        found.upsert(ids, vectors, [{"n": 1}] * 10, ids)
        assert [hit[0] for [hit] in found.query(vectors, 1)] == ids and not found.unsearchable()
    assert {path: path.read_bytes() for path in others} == others and others


def interrupt(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_vectors_come_before_slots_and_go_after_them(index: PassageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interruption leaves can be found, and is listed for the next run."""
    made = make_index_passage("A passage of some words.", "file.txt", "/docs")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Bundle, "compress", interrupt)
        list(index.add([made]))
    assert [hit.id for hit in index.search(["words"], 1)[0]] == [made.id] and len(index.store) == 0
    list(index.add([made]))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PassageCollection, "delete", interrupt)
        index.remove([str(made.id)])
    assert list(index.roots()["/docs"]) == [made.id] and len(index.store) == 0


def test_of_an_apps_own_collection_they_are_reported_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "chroma"
    vectors = np.random.default_rng(0).normal(size=(20, 8)).astype("float32")

    def add(start: int, end: int) -> None:
        client, raw = collection(folder, "docs")
        ids = [f"p{n}" for n in range(start, end)]
        raw.upsert(ids, vectors[start:end], documents=[passage(n) for n in range(start, end)])
        raw.query(query_embeddings=vectors[:1], n_results=1)
        client.close()

    lose(folder, add)
    _, raw = collection(folder, "docs")
    with SoftContextStore(raw, WordBundle(), key=b"k" * 16) as store:
        assert store.sync(raw, progress=False).added == 20
        assert "10 records of the collection 'docs' are in no search result (first: 'p10')" in caplog.text
        caplog.clear()
        assert store.sync(raw, progress=False).unchanged == 20
        assert "in no search result" in caplog.text  # they were not touched
        raw.upsert([f"p{n}" for n in range(10, 20)], vectors[10:])
        caplog.clear()
        store.sync(raw, progress=False)
        assert not caplog.records
