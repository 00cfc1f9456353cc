"""SoftContextStore on real on-disk and in-memory Chroma."""

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chromadb
import pytest
import torch
from helpers_store import WordBundle, assert_same, passage
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, TextNode

from ctx_compress_rag.errors import (
    ConfigError,
    FingerprintMismatchError,
    MissingPassageError,
    PayloadError,
    RatioError,
    StoreError,
    StoreLockedError,
)
from ctx_compress_rag.markers import scope
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.stores import AddReport, Passage, SoftContextStore, StoredPassage
from ctx_compress_rag.stores.keys import KEY_FILE, KEY_VARIABLE

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def no_key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture
def bundle() -> WordBundle:
    return WordBundle()


@pytest.fixture
def store(tmp_path: Path, bundle: WordBundle) -> Iterator[SoftContextStore]:
    with SoftContextStore(tmp_path / "chroma", bundle) as store:
        yield store


def add(store: SoftContextStore, n: int, start: int = 0) -> AddReport:
    ids = [f"p{i}" for i in range(start, start + n)]
    return store.add([passage(i) for i in range(start, start + n)], ids, progress=False)


def run_python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent)]))
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


# What goes in comes out


def test_get_keeps_order_duplicates_and_gaps(store: SoftContextStore, bundle: WordBundle) -> None:
    assert add(store, 12) == AddReport(added=12, updated=0, unchanged=0)
    wanted = ["p7", "nope", "p0", "p7", "p11"]
    got = store.get(wanted)
    assert got[1] is None
    for id, soft in zip(wanted, got, strict=True):
        if id != "nope":
            assert_same(soft, bundle.at(passage(int(id[1:])), 4))
    assert store.get([]) == []
    assert len(store) == 12
    assert sorted(store.ids()) == sorted(f"p{i}" for i in range(12))


def test_an_empty_store_answers(store: SoftContextStore, tmp_path: Path) -> None:
    assert (len(store), store.ids(), store.get(["a"]), store.delete(["a"])) == (0, [], [None], 0)
    assert store.info().passages == 0
    assert bool(store)
    assert not (tmp_path / "chroma" / KEY_FILE).exists()  # reading leaves nothing behind


def test_it_is_there_after_reopening(tmp_path: Path, bundle: WordBundle) -> None:
    with SoftContextStore(tmp_path, bundle, codec="fp16") as store:
        add(store, 3)
    with SoftContextStore(tmp_path, bundle) as store:
        assert store.codec == "fp16"
        assert_same(store.get(["p2"])[0], bundle.at(passage(2), 4), tolerance=1e-3)


def test_passages_come_back_with_their_text(store: SoftContextStore) -> None:
    text = "Größe ≠ \0 taille 𝄞\r\n  two  spaces "
    nested = {"loc": {"from": 1}, "score": float("nan"), "tags": ["a"]}
    store.add([Passage(text, "a", {"source": "x.txt", "page": 3, "ok": True, "none": None, **nested})], progress=False)
    expected = StoredPassage("a", text, {"source": "x.txt", "page": 3, "ok": True, "none": None}, 2, 7)
    assert store.get_passages(["b", "a"]) == [None, expected]


def test_more_ids_than_one_query_takes(store: SoftContextStore) -> None:
    add(store, 600)
    ids = [f"p{i}" for i in range(600)]
    assert all(store.get(ids[::-1]))
    assert store.get(["none"] * 40_000) == [None] * 40_000
    assert store.has([passage(i) for i in range(600)], ids) == [True] * 600
    assert store.delete([*ids[:300], *ids[:10], "none"]) == 300
    assert len(store) == 300


def test_every_kind_of_document(store: SoftContextStore) -> None:
    node = TextNode(text=passage(3), id_="node", metadata={"source": "n"})
    documents = [
        passage(0),
        Passage(passage(1), "mine", {"source": "p"}),
        Document(page_content=passage(2), id="doc", metadata={"source": "d"}),
        node,
        NodeWithScore(node=TextNode(text=passage(4), id_="scored"), score=0.5),
        Document(page_content=passage(0)),  # the same text without an id is the same passage
    ]
    assert store.add(documents, progress=False).added == 5
    found = {p.id: (p.text, p.metadata) for p in store.get_passages(store.ids()) if p}
    (own,) = set(found) - {"mine", "doc", "node", "scored"}
    assert found == {
        own: (passage(0), {}),
        "mine": (passage(1), {"source": "p"}),
        "doc": (passage(2), {"source": "d"}),
        "node": (passage(3), {"source": "n"}),
        "scored": (passage(4), {}),
    }
    assert store.ensure([passage(0)]) == [own]


# Only what is needed is compressed


def test_only_new_and_changed_texts_are_compressed(store: SoftContextStore, bundle: WordBundle) -> None:
    add(store, 5)
    bundle.calls.clear()
    texts = [passage(0), passage(99), passage(2), passage(3), passage(4), passage(5)]
    report = store.add(texts, [f"p{i}" for i in range(6)], progress=False)
    assert report == AddReport(added=1, updated=1, unchanged=4)
    assert bundle.calls == [[passage(99), passage(5)]]
    assert_same(store.get(["p1"])[0], bundle.at(passage(99), 4))
    assert store.get_passages(["p1"])[0].text == passage(99)


def test_texts_that_changed_places_are_noticed(store: SoftContextStore, bundle: WordBundle) -> None:
    add(store, 2)
    assert store.has([passage(1), passage(0)], ["p0", "p1"]) == [False, False]
    assert store.add([passage(1), passage(0)], ["p0", "p1"], progress=False).updated == 2
    assert_same(store.get(["p0"])[0], bundle.at(passage(1), 4))


def test_changed_metadata_are_written_without_compressing(store: SoftContextStore, bundle: WordBundle) -> None:
    store.add([Passage(passage(0), "a", {"source": "old", "page": 1})], progress=False)
    bundle.calls.clear()
    report = store.add([Passage(passage(0), "a", {"source": "new"})], progress=False)
    assert report == AddReport(added=0, updated=1, unchanged=0)
    assert bundle.calls == []
    assert store.get_passages(["a"])[0].metadata == {"source": "new"}
    assert_same(store.get(["a"])[0], bundle.at(passage(0), 4))
    assert store.add([Passage(passage(0), "a", {"source": "new"})], progress=False).unchanged == 1


def test_ensure_compresses_what_is_missing_or_stale(store: SoftContextStore, bundle: WordBundle) -> None:
    store.add([Passage(passage(0), "a", {"source": "kept"}), Passage(passage(1), "b")], progress=False)
    bundle.calls.clear()
    texts = [passage(0), passage(11), passage(2), passage(2)]
    assert store.ensure(texts, ["a", "b", "c", "c"]) == ["a", "b", "c", "c"]
    assert bundle.calls == [[passage(11), passage(2)]]
    assert store.get_passages(["a"])[0].metadata == {"source": "kept"}
    assert store.ensure(texts, ["a", "b", "c", "c"]) == ["a", "b", "c", "c"]
    assert len(bundle.calls) == 1
    assert store.ensure([]) == []


def test_threads_that_ensure_the_same_compress_once(store: SoftContextStore, bundle: WordBundle) -> None:
    texts, ids = [passage(i) for i in range(40)], [f"p{i}" for i in range(40)]
    start = threading.Barrier(6)

    def work(_: int) -> list[SoftContext | None]:
        start.wait()
        return store.get(store.ensure(texts, ids))

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    assert sum(map(len, bundle.calls)) == 40
    for softs in results:
        for i, soft in enumerate(softs):
            assert_same(soft, bundle.at(passage(i), 4))


# Bad input leaves the store as it was


@pytest.mark.parametrize(
    ("documents", "ids", "message"),
    [
        (["good", ""], None, "no text"),
        (["good", " \n\t"], ["a", "b"], "passage 'b' has no text"),
        (["good", None], None, "NoneType"),
        (["good", 3], None, "int"),
        (["good", Passage(5, "five")], None, "'five' has a text of type int"),  # type: ignore[arg-type]
        (["good", "\ud800"], None, "Unicode"),
        (["good", "more"], ["a", ""], "non-empty"),
        (["good", "more"], ["a", 7], "non-empty str, got 7"),
        (["good", "more"], ["a", "a"], "'a' is given twice with different texts"),
        (["good", "good"], ["a", "a"], "'a' is given twice"),
        (["good", "more"], ["a"], "1 ids for 2 documents"),
        ("one text", None, "list"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    store: SoftContextStore, documents: list[object], ids: list[str] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        store.add(documents, ids, progress=False)
    assert len(store) == 0
    assert add(store, 2).added == 2


def test_a_str_in_place_of_ids_is_refused(store: SoftContextStore) -> None:
    add(store, 1)
    with pytest.raises(ConfigError, match="list"):
        store.get("p0")


class BrokenBundle(WordBundle):
    """Makes a NaN of any text that says so."""

    def compress(self, texts: list[str], ratio: int | None = None) -> list[SoftContext]:
        softs = super().compress(texts, ratio)
        for text, soft in zip(texts, softs, strict=True):
            if "nan" in text.split():
                soft.slots[0, 0] = torch.nan
        return softs


@pytest.mark.parametrize("codec", ["int8", "fp16"])
def test_nan_slots_are_refused_and_the_store_goes_on(tmp_path: Path, codec: str) -> None:
    with SoftContextStore(tmp_path, BrokenBundle(), codec=codec) as store:
        add(store, 3)
        with pytest.raises(PayloadError, match=r"'bad'.*NaN"):
            store.add(["fine words", "nan words"], ["fine", "bad"], progress=False)
        assert store.get(["bad"]) == [None]
        assert store.add(["fine words"], ["fine"], progress=False).added == 1
        assert all(store.get(["p0", "p1", "p2", "fine"]))


def test_a_damaged_record_is_named(store: SoftContextStore, tmp_path: Path) -> None:
    add(store, 3)
    raw = chromadb.PersistentClient(tmp_path / "chroma").get_collection("passages-ctx", embedding_function=None)
    payload = raw.get(ids=["p1"])["metadatas"][0]["payload"]
    raw.update(ids=["p1"], metadatas=[{"payload": payload[:-8]}])
    raw.update(ids=["p2"], metadatas=[{"text": "!"}])
    assert store.get(["p0"])[0] is not None
    with pytest.raises(PayloadError, match=r"passage 'p1' is damaged.*delete the passage and add it again"):
        store.get(["p0", "p1"])
    with pytest.raises(PayloadError, match="'p2'"):
        store.get_passages(["p2"])
    assert store.delete(["p1", "p2"]) == 2
    assert add(store, 3) == AddReport(added=2, updated=0, unchanged=1)
    assert all(store.get(["p0", "p1", "p2"]))


# Opening


def test_another_bundle_is_refused(tmp_path: Path, bundle: WordBundle) -> None:
    with SoftContextStore(tmp_path, bundle) as store:
        add(store, 1)
    other = WordBundle("other")
    with pytest.raises(FingerprintMismatchError, match=r"'words'.*'other'.*index again") as caught:
        SoftContextStore(tmp_path, other)
    assert bundle.fingerprint[:12] in str(caught.value)
    with SoftContextStore(tmp_path, other, collection="second") as store:
        assert add(store, 1).added == 1


def test_another_bundle_that_was_first_is_noticed_at_the_first_write(tmp_path: Path, bundle: WordBundle) -> None:
    client = chromadb.PersistentClient(tmp_path)
    late = SoftContextStore(client, WordBundle("other"))
    add(SoftContextStore(client, bundle), 1)
    with pytest.raises(FingerprintMismatchError):
        add(late, 1)


def test_another_codec_is_refused(tmp_path: Path, bundle: WordBundle) -> None:
    with SoftContextStore(tmp_path, bundle, codec="int8") as store:
        add(store, 1)
    with pytest.raises(StoreError, match="'int8', not 'fp16'"):
        SoftContextStore(tmp_path, bundle, codec="fp16")


@pytest.mark.parametrize("arguments", [{"codec": "int3"}, {"key": b"short"}, {"scope": ""}])
def test_impossible_arguments_are_refused(tmp_path: Path, bundle: WordBundle, arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SoftContextStore(tmp_path, bundle, **arguments)


def test_a_foreign_collection_is_refused(tmp_path: Path, bundle: WordBundle) -> None:
    client = chromadb.PersistentClient(tmp_path)
    client.create_collection("passages-ctx", embedding_function=None)
    with pytest.raises(StoreError, match="no store"):
        SoftContextStore(client, bundle)


def test_what_is_no_store_is_refused(tmp_path: Path, bundle: WordBundle) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "chroma.sqlite3").write_text("no database " * 100)
    for location in (tmp_path / "file", tmp_path / "bad", ""):
        with pytest.raises(StoreError, match=r"file|folder|database"):
            SoftContextStore(location, bundle)
    with pytest.raises(ConfigError, match="int"):
        SoftContextStore(3, bundle)


def test_a_client_with_other_settings_is_explained(tmp_path: Path, bundle: WordBundle) -> None:
    settings = chromadb.Settings(allow_reset=True)
    client = chromadb.PersistentClient(str(tmp_path), settings=settings)
    with pytest.raises(StoreError, match="other settings"):
        SoftContextStore(tmp_path, bundle)
    assert add(SoftContextStore(client, bundle), 1).added == 1


def test_in_memory(bundle: WordBundle) -> None:
    client = chromadb.EphemeralClient()
    store = SoftContextStore(client, bundle, collection="in-memory")
    add(store, 2)
    info = store.info()
    assert (info.location, info.disk_bytes, info.payload_share) == ("memory", None, None)
    (marker,) = SoftContextStore(client, bundle, collection="in-memory").split(store.marker("p0", 4))
    assert_same(store.fetch([marker])[0], bundle.at(passage(0), 4))
    client.delete_collection("in-memory-ctx")


def test_beside_an_existing_collection(tmp_path: Path, bundle: WordBundle) -> None:
    client = chromadb.PersistentClient(tmp_path)
    rag = client.create_collection("docs", embedding_function=None)
    rag.add(ids=["p0", "p1"], embeddings=[[0.0, 1.0], [1.0, 0.0]], documents=[passage(0), passage(1)])
    store = SoftContextStore(rag, bundle)
    rows = rag.get(include=["documents"])
    assert store.add(rows["documents"], rows["ids"], progress=False).added == 2
    hit = rag.query(query_embeddings=[[0.9, 0.1]], n_results=1)
    assert hit["ids"] == [["p1"]] and hit["metadatas"] == [[None]]
    assert_same(store.get(hit["ids"][0])[0], bundle.at(passage(1), 4))
    assert {c.name for c in client.list_collections()} == {"docs", "docs-ctx"}
    store.close()  # must leave the app's own client alone
    assert rag.count() == 2
    with SoftContextStore(tmp_path, bundle, collection="docs") as again:
        assert len(again) == 2
    with pytest.raises(ConfigError, match="holds soft contexts itself"):
        SoftContextStore(client.get_collection("docs-ctx", embedding_function=None), bundle)


def test_info(store: SoftContextStore, bundle: WordBundle, tmp_path: Path) -> None:
    add(store, 10)
    info = store.info()
    assert (info.bundle, info.fingerprint, info.base_ratio) == ("words", bundle.fingerprint, 4)
    assert (info.passages, info.slots, info.source_tokens) == (10, 80, 300)
    header, runs, int8 = 18, 2 * 8, 4 + 8 + 8 * 8
    assert info.payload_bytes == 10 * (header + runs + int8)
    on_disk = sum(p.stat().st_size for p in (tmp_path / "chroma").rglob("*") if p.is_file())
    assert info.disk_bytes == on_disk
    assert info.payload_share == info.payload_bytes / on_disk
    assert info.location == str(tmp_path / "chroma")


def test_disk_space_stays_near_the_payload(tmp_path: Path) -> None:
    wide = WordBundle(dim=1024)
    with SoftContextStore(tmp_path, wide) as store:
        store.add([passage(i, words=64) for i in range(120)], progress=False)
        info = store.info()
    fp16 = 2 * info.slots * 1024
    # 1.9 to 2.4 when measured, less in larger stores; other layouts take 5 (document) to 40 (lists) times.
    assert info.disk_bytes < 3 * fp16


# Processes

WRITE = """
import sys
from helpers_store import WordBundle, passage
from ctx_compress_rag.stores import SoftContextStore
"""


def test_kill_in_the_middle_loses_nothing_and_a_rerun_completes(tmp_path: Path, bundle: WordBundle) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    code = f"""{WRITE}
import os, signal
class Dying(WordBundle):
    def compress(self, texts, ratio=None):
        if len(self.calls) == 3:
            print(sum(map(len, self.calls)), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compress(texts, ratio)
SoftContextStore(sys.argv[1], Dying()).add([passage(i) for i in range(200)], [f"p{{i}}" for i in range(200)])
"""
    run = run_python(code, killed)
    assert run.returncode == -9
    with SoftContextStore(killed, bundle) as store, SoftContextStore(whole, bundle) as reference:
        survived = len(store)
        assert survived == int(run.stdout) < 200  # the batches that were written before the fourth
        assert add(store, 200) == AddReport(added=200 - survived, updated=0, unchanged=survived)
        add(reference, 200)
        ids = [f"p{i}" for i in range(200)]
        for one, other in zip(store.get(ids), reference.get(ids), strict=True):
            assert torch.equal(one.slots, other.slots)
        assert store.get_passages(ids) == reference.get_passages(ids)
        assert add(store, 200).unchanged == 200


def test_one_writer_and_any_reader(tmp_path: Path, bundle: WordBundle) -> None:
    code = f"""{WRITE}
from ctx_compress_rag.errors import StoreLockedError
store = SoftContextStore(sys.argv[1], WordBundle())
print(len(store), store.get(["p0"])[0] is not None, store.ensure([passage(0)], ["p0"]))
try:
    store.add([passage(7)], ["other"], progress=False)
except StoreLockedError as error:
    print("locked:", error)
"""
    with SoftContextStore(tmp_path, bundle) as store:
        add(store, 2)
        run = run_python(code, tmp_path)
        assert run.stdout.startswith(f"2 True ['p0']\nlocked: another process is writing to the store {tmp_path}"), run
        assert "chroma run" in run.stdout
        # A second store of this process writes along, also through a client and another spelling of the path.
        with SoftContextStore(tmp_path / ".." / tmp_path.name, bundle) as second:
            assert add(second, 1, start=5).added == 1
        assert add(store, 1, start=6).added == 1
        assert "locked" in run_python(code, tmp_path).stdout
    assert "locked" not in run_python(code, tmp_path).stdout
    assert sorted(SoftContextStore(tmp_path, bundle).ids()) == ["other", "p0", "p1", "p5", "p6"]


def test_a_dead_writers_lock_is_free(tmp_path: Path, bundle: WordBundle) -> None:
    code = f"""{WRITE}
import os, signal
SoftContextStore(sys.argv[1], WordBundle()).add([passage(0)], ["p0"], progress=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code, tmp_path).returncode == -9
    with SoftContextStore(tmp_path, bundle) as store:
        assert add(store, 2) == AddReport(added=1, updated=0, unchanged=1)


def test_a_store_carried_over_a_fork_says_so_and_keeps_the_lock(tmp_path: Path) -> None:
    code = f"""{WRITE}
import multiprocessing, subprocess
from ctx_compress_rag.errors import StoreError
store = SoftContextStore(sys.argv[1], WordBundle())
store.add([passage(0)], ["p0"], progress=False)
def child():
    try:
        store.get(["p0"])
    except StoreError as error:
        print("child:", error, flush=True)
process = multiprocessing.get_context("fork").Process(target=child)
process.start(); process.join(30)
print("exit", process.exitcode, flush=True)
other = "import sys; from filelock import FileLock; FileLock(sys.argv[1] + '/ctx-compress.lock').acquire(timeout=0)"
print("lock", "Timeout" in subprocess.run([sys.executable, "-c", other, sys.argv[1]],
      capture_output=True, text=True).stderr)
"""
    lines = run_python(code, tmp_path).stdout.splitlines()
    assert "before a fork" in lines[0] and "spawn" in lines[0]
    assert lines[1:] == ["exit 0", "lock True"]


def test_a_closed_store_says_so(tmp_path: Path, bundle: WordBundle) -> None:
    store = SoftContextStore(tmp_path, bundle)
    add(store, 1)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get(["p0"])
    with pytest.raises(StoreError, match="closed"):
        add(store, 1)


# Markers


@pytest.mark.parametrize("ratio", [4, 8, 12, 16, 28, 32, 400, 16384])
def test_a_marker_fetches_its_passage_at_its_ratio(store: SoftContextStore, bundle: WordBundle, ratio: int) -> None:
    texts = [passage(i, words) for i, words in enumerate((1, 4, 5, 17, 30, 37))]
    ids = store.ensure(texts)
    markers = store.markers(ids, ratio)
    assert markers == store.markers(ids, ratio)
    parts = store.split("Read: " + " and ".join(markers) + "?")
    found = parts[1::2]
    assert parts[::2] == ["Read: ", *[" and "] * 5, "?"]
    for marker, soft, text in zip(found, store.fetch(found), texts, strict=True):
        direct = bundle.at(text, ratio)
        assert marker.slots == soft.n_slots == direct.n_slots
        assert_same(soft, direct, tolerance=0.015)
    assert store.text_of(found) == texts
    assert store.fetch(found[::-1])[0].n_tokens == 37
    assert store.fetch([]) == store.text_of([]) == []


def test_one_passage_under_two_ids_has_one_marker(store: SoftContextStore) -> None:
    store.add([passage(0), passage(0)], ["a", "b"], progress=False)
    first, second = store.markers(["a", "b"], 8)
    assert first == second
    store.delete(["a"])
    (marker,) = store.split(first)
    assert store.text_of([marker, marker]) == [passage(0)] * 2


def test_markers_of_other_tenants_and_stores_stay_text(store: SoftContextStore, tmp_path: Path) -> None:
    add(store, 1)
    mine = store.marker("p0", 8)
    theirs = store.marker("p0", 8, scope="theirs")
    with scope("theirs"):
        assert store.marker("p0", 8) == theirs
        assert store.split(mine) == [mine]
        assert len(store.fetch(store.split(theirs))) == 1
    assert store.split(theirs) == [theirs]
    assert store.split(theirs, scope="theirs") != [theirs]
    assert SoftContextStore(tmp_path / "chroma", store.bundle, scope="theirs").split(theirs) != [theirs]
    assert SoftContextStore(tmp_path / "elsewhere", store.bundle).split(mine) == [mine]


def test_a_marker_of_what_is_gone_is_a_clear_error(store: SoftContextStore) -> None:
    add(store, 2)
    parts = store.split("".join(store.markers(["p0", "p1"], 8)))
    store.delete(["p0"])
    store.add([passage(77)], ["p1"], progress=False)
    for read in (store.fetch, store.text_of):
        for marker in parts:
            with pytest.raises(MissingPassageError, match="retrieve again"):
                read([marker])
    with pytest.raises(MissingPassageError, match="'p0' is not stored"):
        store.markers(["p1", "p0"], 8)


@pytest.mark.parametrize("ratio", [0, -4, 2, 6, 4 * 4097])
def test_a_ratio_that_cannot_be_made_is_refused(store: SoftContextStore, ratio: int) -> None:
    add(store, 1)
    with pytest.raises(RatioError, match=f"ratio {ratio} .*multiple of 4"):
        store.marker("p0", ratio)


def test_slots_that_do_not_nest_are_not_merged(tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, WordBundle(nestable=False)) as store:
        add(store, 1)
        assert store.split(store.marker("p0", 4))[0].slots == 8
        with pytest.raises(RatioError, match="cannot be merged"):
            store.marker("p0", 8)


# Keys


def test_the_key_file_is_private_and_shared_by_processes(store: SoftContextStore, tmp_path: Path) -> None:
    add(store, 1)
    path = tmp_path / "chroma" / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code = f"{WRITE}print(SoftContextStore(sys.argv[1], WordBundle()).marker('p0', 8))"
    assert run_python(code, tmp_path / "chroma").stdout.strip() == store.marker("p0", 8)


def test_the_key_is_not_in_chroma(store: SoftContextStore, tmp_path: Path) -> None:
    add(store, 1)
    key = (tmp_path / "chroma" / KEY_FILE).read_text()
    dump = "\n".join(sqlite3.connect(tmp_path / "chroma" / "chroma.sqlite3").iterdump())
    assert "passages-ctx" in dump and key not in dump and bytes.fromhex(key).hex().upper() not in dump


def test_processes_that_make_the_key_at_once_agree(tmp_path: Path) -> None:
    from ctx_compress_rag.stores.keys import key_from_file

    start = threading.Barrier(8)

    def make(_: int) -> bytes:
        start.wait()
        return key_from_file(tmp_path / "new" / "key")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make, range(8)))) == 1
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["key"]


def test_environment_and_explicit_keys_come_first(
    store: SoftContextStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, 1)
    folder, bundle = tmp_path / "chroma", store.bundle
    from_file = store.marker("p0", 8)
    monkeypatch.setenv(KEY_VARIABLE, "an environment's secret")
    from_env = SoftContextStore(folder, bundle).marker("p0", 8)
    explicit = SoftContextStore(folder, bundle, key=b"an explicit secret").marker("p0", 8)
    assert len({from_file, from_env, explicit}) == 3
    assert SoftContextStore(folder, bundle, key=b"an environment's secret").marker("p0", 8) == from_env
    # A passage stored under the old key is found by markers of the new one.
    reader = SoftContextStore(folder, bundle)
    assert reader.text_of(reader.split(from_env)) == [passage(0)]
    assert reader.split(from_file) == [from_file]
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(StoreError, match=r"5 bytes.*at least 16"):
        SoftContextStore(folder, bundle).marker("p0", 8)


@pytest.mark.parametrize(("content", "mode"), [("zz", 0o600), ("ab", 0o600), ("", 0o600), ("ab" * 32, 0o644)])
def test_a_damaged_or_open_key_file_is_refused(tmp_path: Path, bundle: WordBundle, content: str, mode: int) -> None:
    path = tmp_path / KEY_FILE
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(StoreError, match="chmod 600" if mode == 0o644 else "damaged"):
        add(SoftContextStore(tmp_path, bundle), 1)


# Beside the frameworks' own stores, with their ids


class FewWords:
    """Three-dimensional embeddings, as LangChain wants them: real ones are not the point here."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [float(text.count(c)) for c in "135"]


@pytest.mark.parametrize("absolute", [True, False])
def test_beside_langchain_chroma(
    tmp_path: Path, bundle: WordBundle, monkeypatch: pytest.MonkeyPatch, absolute: bool
) -> None:
    from langchain_chroma import Chroma

    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path / "chroma") if absolute else "./relative-chroma"
    vectors = Chroma(collection_name="docs", embedding_function=FewWords(), persist_directory=folder)
    documents = [Document(page_content=passage(i), metadata={"source": f"{i}.txt"}) for i in range(6)]
    ids = vectors.add_documents(documents)
    with SoftContextStore(folder, bundle, collection="docs") as store:
        store.add(documents, ids, progress=False)
        for hit in vectors.similarity_search(passage(5), k=3):
            assert hit.metadata.keys() == {"source"}  # no payload travels with the app's hits
            assert_same(store.get([hit.id])[0], bundle.at(hit.page_content, 4))
            assert store.has([hit.page_content], [hit.id]) == [True]
        vectors.add_documents([Document(page_content=passage(9))], ids=[ids[0]])
        (changed,) = vectors.get_by_ids([ids[0]])
        assert store.has([changed.page_content], [changed.id]) == [False]
        store.ensure([changed.page_content], [changed.id])
        assert_same(store.get([changed.id])[0], bundle.at(passage(9), 4))
        vectors.delete([ids[1]])
        assert store.delete([ids[1]]) == 1
    assert len(vectors.similarity_search(passage(2), k=10)) == 5


def test_beside_llama_index_chroma(tmp_path: Path, bundle: WordBundle) -> None:
    from llama_index.core import StorageContext, VectorStoreIndex
    from llama_index.core.embeddings import MockEmbedding
    from llama_index.vector_stores.chroma import ChromaVectorStore

    client = chromadb.PersistentClient(tmp_path)
    collection = client.create_collection("docs", embedding_function=None)
    nodes = [TextNode(text=passage(i), metadata={"source": f"{i}.txt"}) for i in range(5)]
    context = StorageContext.from_defaults(vector_store=ChromaVectorStore(chroma_collection=collection))
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=MockEmbedding(embed_dim=3))
    store = SoftContextStore(collection, bundle)
    store.add(nodes, progress=False)
    hits = index.as_retriever(similarity_top_k=3).retrieve("anything")
    assert len(hits) == 3
    for hit in hits:
        assert hit.node.metadata.keys() == {"source"}
        assert_same(store.get([hit.node.node_id])[0], bundle.at(hit.node.get_content(), 4))
        assert store.has([hit.node.get_content()], [hit.node.node_id]) == [True]
    assert store.add(hits, progress=False).unchanged == 3


def test_a_copied_folder_is_the_same_store(tmp_path: Path, bundle: WordBundle) -> None:
    with SoftContextStore(tmp_path / "one", bundle) as store:
        add(store, 3)
        marker = store.marker("p1", 8)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with SoftContextStore(tmp_path / "two", bundle) as copy:
        assert copy.text_of(copy.split(marker)) == [passage(1)]


def test_a_locked_store_refuses_before_compressing(tmp_path: Path, bundle: WordBundle) -> None:
    code = f"""{WRITE}
store = SoftContextStore(sys.argv[1], WordBundle())
store.add([passage(0)], ["p0"], progress=False)
print("ready", flush=True)
sys.stdin.read()
"""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent)]))
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        with SoftContextStore(tmp_path, bundle) as store:
            with pytest.raises(StoreLockedError, match=str(tmp_path)):
                add(store, 3)
            with pytest.raises(StoreLockedError):
                store.delete(["p0"])
            assert bundle.calls == []
            assert store.delete(["none"]) == 0
            writer.communicate()
            assert add(store, 3) == AddReport(added=2, updated=0, unchanged=1)


def test_a_store_keeps_the_ratio_it_was_made_with(tmp_path: Path) -> None:
    bundle = WordBundle(nestable=False)
    with SoftContextStore(tmp_path, bundle, ratio=8) as store:
        store.add([passage(1)], ["a"], progress=False)
        assert_same(store.get(["a"])[0], bundle.at(passage(1), 8))
        with pytest.raises(RatioError, match="only 8 is stored"):
            store.markers(["a"], 16)
    with SoftContextStore(tmp_path, bundle) as again:
        assert again.base_ratio == 8
        again.add([passage(2)], ["b"], progress=False)
        assert_same(again.get(["b"])[0], bundle.at(passage(2), 8))
    with pytest.raises(StoreError, match="has ratio 8, not 4"):
        SoftContextStore(tmp_path, bundle, ratio=4)
