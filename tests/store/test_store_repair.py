"""Folders that Chroma cannot read any more, and what `repair_store` makes of them."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import chromadb
import pytest

from ctx_compress_rag.errors import PayloadError, StoreError
from ctx_compress_rag.indexing.index import BUNDLE_KEY
from ctx_compress_rag.indexing.upkeep import back_up_store, repair_store, vacuum_store
from ctx_compress_rag.store import Passage, SoftContextStore
from ctx_compress_rag.store.key import KEY_FILE
from ctx_compress_rag.store.marker import MarkerCodec
from ctx_compress_rag.text.passage_vectors import passage_vectors
from helpers.forked import Forked, run_python
from helpers.store import LEAVE_JOURNAL, WRITE, WordBundle, add, assert_same, passage

N = 130  # beyond 100 Chroma writes an index
KEY = b"sixteen bytes or more"


def halved(name: str) -> Callable[[Path], object]:
    return lambda index: (index / name).write_bytes((index / name).read_bytes()[:50])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "vectors cut": halved("data_level0.bin"),  # crashes the process that writes
    "header emptied": lambda index: (index / "header.bin").write_bytes(b""),
    "ids cut": halved("index_metadata.pickle"),
    "vectors gone": lambda index: (index / "data_level0.bin").unlink(),
    "all gone": shutil.rmtree,
}


def damaged_store(folder: Path, damage: Callable[[Path], object]) -> None:
    with SoftContextStore(folder, WordBundle()) as store:
        add(store, N)
        store.add([passage(1000)], ["p0"], scope="tenant", progress=False)
    [index] = [path for path in folder.iterdir() if path.is_dir()]
    damage(index)


READ_INDEX = """
import sys, chromadb
collection = chromadb.PersistentClient(sys.argv[1]).get_collection("passages-ctx", embedding_function=None)
print(len(collection.get(include=["embeddings"])["embeddings"]))
"""


@pytest.mark.parametrize("name", DAMAGE)
def test_all_records_of_a_broken_folder_come_back(tmp_path: Path, name: str) -> None:
    folder, bundle = tmp_path / "store", WordBundle()
    damaged_store(folder, DAMAGE[name])
    shutil.copytree(folder, tmp_path / "broken")
    assert run_python(READ_INDEX, tmp_path / "broken").returncode != 0  # which may crash
    before = sorted(path.name for path in folder.iterdir())

    report = repair_store(folder)

    assert (report.rebuilt.records, report.damaged) == ({"passages-ctx": N + 1}, [])
    assert set(before) - set(path.name for path in report.backup.iterdir()) <= {
        "ctx-compress.lock",
        "ctx-compress.turn",
        "ctx-compress.readers",
    }
    assert run_python(READ_INDEX, folder).stdout == f"{N + 1}\n"
    with SoftContextStore(folder, bundle) as store:
        for n, (soft, kept) in enumerate(
            zip(store.get([f"p{n}" for n in range(N)]), store.get_passages([f"p{n}" for n in range(N)]), strict=True)
        ):
            assert_same(soft, bundle.at(passage(n), 4))
            assert kept is not None and kept.text == passage(n)
        assert_same(store.get(["p0"], scope="tenant")[0], bundle.at(passage(1000), 4))
        assert add(store, N + 1).added == 1
        assert store.delete([f"p{N}"]) == 1


def test_vectors_of_an_index_are_embedded_again_and_those_of_an_app_are_left(tmp_path: Path) -> None:
    client = chromadb.PersistentClient(str(tmp_path / "store"))
    texts = [f"Passage {n} is about the number {n}." for n in range(20)]
    small: Any = {"hnsw": {"sync_threshold": 5, "batch_size": 5, "space": "cosine"}}
    own = client.create_collection("passages", configuration=small, metadata={BUNDLE_KEY: "demo"})
    own.add([f"p{n}" for n in range(20)], passage_vectors(texts), [{"source": "a", "n": n} for n in range(20)], texts)
    apps = client.create_collection("apps", configuration=small)
    apps.add([f"p{n}" for n in range(20)], [[float(n)] for n in range(20)])
    client.close()
    with SoftContextStore(tmp_path / "store", WordBundle()) as store:
        store.add(texts, [f"p{n}" for n in range(20)], progress=False)
    for index in (tmp_path / "store").iterdir():
        if index.is_dir():
            (index / "data_level0.bin").unlink()

    report = repair_store(tmp_path / "store")

    assert report.rebuilt.broken == ["apps"]
    assert report.rebuilt.records == {"passages": 20, "passages-ctx": 20}
    client = chromadb.PersistentClient(str(tmp_path / "store"))
    found = client.get_collection("passages", embedding_function=None)
    near: Any = found.query(query_embeddings=passage_vectors([texts[7]]), n_results=1)
    assert (near["ids"], near["documents"]) == ([["p7"]], [[texts[7]]])
    assert near["metadatas"] == [[{"source": "a", "n": 7}]]
    assert near["distances"][0][0] == pytest.approx(0, abs=1e-5)
    client.close()
    assert repair_store(tmp_path / "store").rebuilt.records == {"passages-ctx": 20}  # a sound index is left


@pytest.mark.parametrize("name", ["victim", "."])
def test_repair_deletes_no_folder_but_an_index(tmp_path: Path, name: str) -> None:
    """The database of a store from someone else may name any folder as an index."""
    folder, victim = tmp_path / "store", tmp_path / "victim"
    with SoftContextStore(folder, WordBundle(), key=KEY) as store:
        add(store, 3)
    victim.mkdir()
    (victim / "thesis.txt").write_text("the only copy")
    forged = str(victim) if name == "victim" else name
    with closing(sqlite3.connect(folder / "chroma.sqlite3")) as database, database:
        database.execute("update segments set id = ? where scope = 'VECTOR'", (forged,))
    with pytest.raises(StoreError, match=f"{re.escape(repr(forged))}, which Chroma never gives"):
        repair_store(folder)
    assert (victim / "thesis.txt").exists() and (folder / "chroma.sqlite3").stat().st_size > 0


def test_records_of_versions_that_did_not_seal_metadata_are_read(tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, WordBundle(), key=KEY) as store:
        add(store, 1)
        raw = chromadb.PersistentClient(tmp_path).get_collection("passages-ctx", embedding_function=None)
        row = dict(raw.get(ids=["p0"])["metadatas"][0])
        fields = (str(row[name]) for name in ("text_hash", "marker", "slots", "tokens", "payload_hash"))
        seal = MarkerCodec(KEY, store.fingerprint).seal("p0", *fields)
        raw.update(ids=["p0"], metadatas=[{"seal": seal, "metadata_seal": None}])
        assert store.damaged() == [] and store.get_passages(["p0"])[0].text == passage(0)


def strip_seals(folder: Path) -> None:
    """As a store of format 1 was."""
    client = chromadb.PersistentClient(str(folder))
    raw = client.get_collection("passages-ctx", embedding_function=None)
    raw.modify(metadata={**raw.metadata, "ctx_format": 1})
    raw.update(ids=raw.get()["ids"], metadatas=[{"seal": None, "payload_hash": None}] * raw.count())
    client.close()


def test_records_without_a_seal_are_not_read_before_they_get_one(tmp_path: Path) -> None:
    """Whatever format the collection claims: whoever can write records can write that, too."""
    folder, bundle = tmp_path / "store", WordBundle()
    with SoftContextStore(folder, bundle, key=KEY) as store:
        add(store, 3)
    strip_seals(folder)
    with SoftContextStore(folder, bundle, key=KEY) as store:
        with pytest.raises(PayloadError, match=r"'p1' is damaged \(it has no seal.*repair --reseal"):
            store.get(["p1"])
        assert store.damaged() == ["p0", "p1", "p2"]
        assert store.reseal() == 3
        assert store.reseal() == 0
        assert_same(store.get(["p1"])[0], bundle.at(passage(1), 4))


def test_records_of_a_lost_key_get_a_new_seal_where_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, bundle = tmp_path / "store", WordBundle()
    with SoftContextStore(folder, bundle, key=KEY) as store:
        add(store, 3)
        store.add([passage(7)], ["p0"], scope="tenant", progress=False)
        raw = chromadb.PersistentClient(str(folder)).get_collection("passages-ctx", embedding_function=None)
        other: Any = raw.get(ids=["p0"])["metadatas"]
        raw.update(ids=["p2"], metadatas=[{"text": other[0]["text"]}])
    monkeypatch.setenv("CTX_COMPRESS_KEY", "another key, since that one was lost")
    assert len(repair_store(folder).damaged) == 4
    report = repair_store(folder, reseal=True)
    assert (report.resealed, report.damaged) == (3, ["p2"])
    with SoftContextStore(folder, bundle) as store:
        for scope, n in (("default", 0), ("tenant", 7)):
            [marker] = store.split(store.marker("p0", 4, scope), scope)
            assert store.text_of([marker]) == [passage(n)]  # type: ignore[list-item]
            assert_same(store.fetch([marker])[0], bundle.at(passage(n), 4))  # type: ignore[list-item]
        [marker] = store.split(store.marker("p0", 4, "stranger"), "stranger")
        assert store.text_of([marker]) == [passage(0)]  # type: ignore[list-item]


def test_a_copy_under_a_busy_writer_is_whole(tmp_path: Path) -> None:
    folder, bundle = tmp_path / "store", WordBundle()
    code = f"""{WRITE}
with SoftContextStore(sys.argv[1], WordBundle()) as store:
    for n in range(0, 100_000, 13):
        store.add([passage(i) for i in range(n, n + 13)], [f"p{{i}}" for i in range(n, n + 13)], progress=False)
        print(n + 13, flush=True)
"""
    copies: list[tuple[int, Path]] = []
    with Forked(code, folder) as busy:
        for n in range(4):
            written = int(busy.stdout.readline())
            back_up_store(folder, tmp_path / f"copy{n}")
            copies.append((written, tmp_path / f"copy{n}"))
    for written, copied in copies:
        assert (copied / KEY_FILE).stat().st_mode & 0o777 == 0o600
        with SoftContextStore(copied, bundle) as store:
            assert len(store) >= written  # what was acknowledged before is in it
            assert store.damaged() == []
            assert all(store.get([f"p{i}" for i in range(written)]))
            assert add(store, 1, start=200_000).added == 1


def test_a_copy_replaces_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with SoftContextStore(folder, WordBundle()) as store:
        add(store, 1)
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "there", folder / "inside", folder):
        with pytest.raises(StoreError, match="does not exist yet"):
            back_up_store(folder, target)
    with pytest.raises(StoreError, match="no store at"):
        back_up_store(tmp_path / "none", tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "there"]


def test_damage_that_could_end_chromas_process_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with SoftContextStore(folder, WordBundle(), key=KEY) as store:
        add(store, N)
    database = folder / "chroma.sqlite3"
    data = bytearray(database.read_bytes())
    for page in range(20, 40):
        data[4096 * page : 4096 * page + 100] = bytes(100)
    database.write_bytes(data)
    for mend in (lambda: back_up_store(folder, tmp_path / "copy"), lambda: repair_store(folder)):
        with pytest.raises(StoreError, match="damaged|malformed"):
            mend()
    assert [path.name for path in tmp_path.iterdir()] == ["store"] and database.read_bytes() == data


@pytest.mark.parametrize("kept", [0, 1, N])
def test_vacuum_leaves_nothing_of_what_was_deleted(tmp_path: Path, kept: int) -> None:
    folder, bundle = tmp_path / "store", WordBundle()
    with SoftContextStore(folder, bundle, key=KEY, collection="mine") as store:
        add(store, kept)
        store.add([Passage("zqj hidden words", "gone", {"note": "vxk hidden"})], progress=False)
        store.delete(["gone"])
    app = chromadb.PersistentClient(folder)
    mine = app.create_collection("mine", embedding_function=None)
    texts = ["zqj hidden words", *(passage(i) for i in range(kept))]
    ids = ["gone", *(f"p{i}" for i in range(kept))]
    vectors = [[float(i), 1.0] for i in range(1 + kept)]
    mine.add(ids, vectors, documents=texts, metadatas=[{"note": "vxk hidden"}] * (1 + kept))
    if kept:
        mine.update(ids[1:], metadatas=[{"note": "seen"}] * kept)
    mine.delete(["gone"])
    before = held(mine)
    assert found(folder) == (True, True)
    app.close()

    size = (folder / "chroma.sqlite3").stat().st_size
    assert vacuum_store(folder) == size - (folder / "chroma.sqlite3").stat().st_size
    assert found(folder) == (False, False)
    again = chromadb.PersistentClient(folder).get_collection("mine", embedding_function=None)
    assert held(again) == before
    assert again.configuration["hnsw"]["sync_threshold"] == 1000
    with SoftContextStore(folder, bundle, key=KEY, collection="mine") as store:
        assert len(store) == kept and store.damaged() == []
        for i in range(kept):
            assert_same(store.get([f"p{i}"])[0], bundle.at(passage(i), 4))


def test_vacuum_may_come_first_after_a_kill_in_the_middle_of_a_transaction(tmp_path: Path) -> None:
    folder, bundle = tmp_path / "store", WordBundle()
    with SoftContextStore(folder, bundle) as store:
        add(store, 40)
    assert run_python(LEAVE_JOURNAL, folder).returncode == -9
    vacuum_store(folder)
    with SoftContextStore(folder, bundle) as store:
        assert len(store) == 40 and store.damaged() == []


DIE = """
import os, signal, sys, chromadb
from ctx_compress_rag.indexing.upkeep import vacuum_store
name, left = sys.argv[2], int(sys.argv[3])
usual = getattr(chromadb.Collection, name)
def dying(*args, **kwargs):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return usual(*args, **kwargs)
setattr(chromadb.Collection, name, dying)
vacuum_store(sys.argv[1])
"""
"""A vacuum that is killed before its n-th call of a method of Chroma's collections."""


def with_an_apps_collection(folder: Path) -> None:
    client = chromadb.PersistentClient(folder)
    configuration: Any = {"hnsw": {"sync_threshold": 50, "batch_size": 10}}
    mine = client.create_collection("passages", configuration=configuration, embedding_function=None)
    mine.add([f"p{i}" for i in range(3)], [[float(i), 1.0] for i in range(3)], documents=["a", "b", "c"])
    client.close()
    with SoftContextStore(folder, WordBundle()) as store:
        add(store, 3)


def ids_and_threshold(folder: Path) -> dict[str, tuple[list[str], int]]:
    client = chromadb.PersistentClient(folder)
    collections = client.list_collections()
    state = {each.name: (each.get()["ids"], each.configuration["hnsw"]["sync_threshold"]) for each in collections}
    client.close()
    return state  # type: ignore[return-value]


AS_BEFORE = {"passages": (["p0", "p1", "p2"], 50), "passages-ctx": (["p0", "p1", "p2"], 100)}


def write_anything(folder: Path) -> None:
    with SoftContextStore(folder, WordBundle()) as store:
        store.delete(["p2"])
        add(store, 3)


@pytest.mark.parametrize("mend", [write_anything, vacuum_store, repair_store])
@pytest.mark.parametrize(
    ("method", "nth"), [("modify", 1), ("modify", 2), ("upsert", 1), ("upsert", 2), ("delete", 1), ("modify", 3)]
)
def test_what_a_killed_vacuum_left_is_undone(
    tmp_path: Path, method: str, nth: int, mend: Callable[[Path], object]
) -> None:
    folder = tmp_path / "store"
    with_an_apps_collection(folder)
    assert run_python(DIE, folder, method, nth).returncode == -9
    assert (method, nth) == ("modify", 1) or ids_and_threshold(folder) != AS_BEFORE
    assert (folder / "ctx-compress.vacuum.json").exists()
    mend(folder)
    assert ids_and_threshold(folder) == AS_BEFORE
    assert not list(folder.glob("ctx-compress.vacuum*"))


def test_a_vacuum_leaves_each_threshold_as_it_was(tmp_path: Path) -> None:
    with_an_apps_collection(tmp_path)
    client = chromadb.PersistentClient(tmp_path)
    client.get_collection("passages", embedding_function=None).modify(configuration={"hnsw": {"sync_threshold": 2}})
    client.close()
    vacuum_store(tmp_path)
    assert ids_and_threshold(tmp_path) == {**AS_BEFORE, "passages": (["p0", "p1", "p2"], 2)}


NOTED: dict[str, Any] = {"tenant": "default_tenant", "database": "default_database"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '"\\ud800"',
        json.dumps(NOTED),
        json.dumps({**NOTED, "sync_threshold": 7}),
        *(
            json.dumps({**NOTED, "sync_threshold": {"passages": wrong}})
            for wrong in ("7", 0, -1, 1.5, True, None, 1 << 64)
        ),
    ],
)
def test_a_damaged_note_of_a_vacuum_is_dropped_with_a_warning(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    with_an_apps_collection(tmp_path)
    note = tmp_path / "ctx-compress.vacuum.json"
    note.write_text(content)
    write_anything(tmp_path)
    assert ids_and_threshold(tmp_path) == AS_BEFORE
    assert not note.exists()
    [warning] = caplog.messages
    assert f"{note} is damaged" in warning and "run `ctx-compress vacuum`" in warning


def test_a_note_of_a_vacuum_changes_nothing_that_a_vacuum_did_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever can write to the folder can write the note, and the app may have set a threshold since."""
    with_an_apps_collection(tmp_path)
    note = tmp_path / "ctx-compress.vacuum.json"
    note.write_text(json.dumps({**NOTED, "sync_threshold": {"passages": 7, "gone": 9, "../x": 9, "": 9}}))
    write_anything(tmp_path)
    assert ids_and_threshold(tmp_path) == AS_BEFORE
    assert not note.exists() and not caplog.messages
    note.write_text(json.dumps({**NOTED, "database": "another", "sync_threshold": {"passages": 7}}))
    write_anything(tmp_path)
    assert note.exists()  # for a store in that database


def test_an_apps_damaged_index_keeps_no_other_collection_from_being_written_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    client = chromadb.PersistentClient(folder)
    small: Any = {"hnsw": {"sync_threshold": 5, "batch_size": 5}}
    apps = client.create_collection("apps", configuration=small, embedding_function=None)
    apps.add([f"p{i}" for i in range(20)], [[float(i)] for i in range(20)])
    client.close()
    [index] = [path for path in folder.iterdir() if path.is_dir()]
    with SoftContextStore(folder, WordBundle()) as store:
        add(store, 3)
    assert run_python(DIE, folder, "upsert", 1).returncode == -9
    (index / "header.bin").write_bytes(b"")
    write_anything(folder)
    assert "may still be in collection 'apps'" in caplog.text and "passages-ctx" not in caplog.text
    assert repair_store(folder).rebuilt.broken == ["apps"]
    client = chromadb.PersistentClient(folder)
    thresholds = {each.name: each.configuration["hnsw"]["sync_threshold"] for each in client.list_collections()}
    assert thresholds == {"apps": 5, "passages-ctx": 100}
    client.delete_collection("apps")
    client.close()
    write_anything(folder)
    assert not (folder / "ctx-compress.vacuum.json").exists()


def test_a_link_in_place_of_a_vacuums_files_is_not_followed(tmp_path: Path) -> None:
    folder, precious = tmp_path / "store", tmp_path / "precious"
    with_an_apps_collection(folder)
    precious.write_text("words")
    for name in ("ctx-compress.vacuum.json", "ctx-compress.vacuum.json.part"):
        (folder / name).symlink_to(precious)
    vacuum_store(folder)
    assert precious.read_text() == "words" and ids_and_threshold(folder) == AS_BEFORE


def held(collection: Any) -> list[list[str]]:
    """All that a collection has, as text."""
    rows = collection.get(include=["embeddings", "documents", "metadatas"])
    return [list(map(str, rows[name])) for name in ("ids", "documents", "metadatas", "embeddings")]


def found(folder: Path) -> tuple[bool, bool]:
    """Whether the deleted words are anywhere in the database's bytes, and in the full-text index's letters."""
    with closing(sqlite3.connect(folder / "chroma.sqlite3")) as rows:
        blocks = rows.execute("select block from embedding_fulltext_search_data").fetchall()
    data = (folder / "chroma.sqlite3").read_bytes()
    return b"zqj hidden" in data or b"vxk hidden" in data, any(b"zqj" in block for (block,) in blocks)
