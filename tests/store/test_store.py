"""SoftContextStore on real on-disk and in-memory Chroma."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import pytest
from chromadb.errors import ChromaAuthError
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, TextNode

from ctx_compress_rag.errors import (
    ConfigError,
    FingerprintMismatchError,
    MissingPassageError,
    PayloadError,
    RatioError,
    StoreError,
    UnreadableMarkerError,
)
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import AddReport, Passage, SoftContextStore, StoredPassage
from ctx_compress_rag.store.key import KEY_FILE
from ctx_compress_rag.store.passage import passage_content_id
from helpers.store import WordBundle, add, assert_same, passage


def test_get_keeps_order_duplicates_and_gaps(store: SoftContextStore, bundle: WordBundle) -> None:
    assert add(store, 12) == AddReport(added=12, updated=0, unchanged=0)
    wanted = ["p7", "nope", "p0", "p7", "p11"]
    got = store.get(iter(wanted))  # type: ignore[arg-type]
    assert got[1] is None
    for id, soft in zip(wanted, got, strict=True):
        if id != "nope":
            assert_same(soft, bundle.at(passage(int(id[1:])), 4))
    assert store.get([]) == []
    assert len(store) == 12
    assert sorted(store.ids()) == sorted(f"p{i}" for i in range(12))
    texts, ids = [passage(1), passage(0)], ["p1", "p0"]
    assert store.stored_ids(texts, iter(ids)) == ids  # type: ignore[arg-type]
    assert store.delete(iter(ids)) == 2  # type: ignore[arg-type]


def test_an_empty_store_answers(store: SoftContextStore, tmp_path: Path) -> None:
    assert (len(store), store.ids(), store.get(["a"]), store.delete(["a"])) == (0, [], [None], 0)
    assert store.info().passages == 0
    assert bool(store)
    assert not (tmp_path / "chroma" / KEY_FILE).exists()  # reading leaves nothing behind


@pytest.mark.parametrize("policy", ["text", "error", None])
def test_a_store_that_holds_nothing_says_so_once_when_passages_are_looked_up(
    tmp_path: Path, bundle: WordBundle, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    """With its place and what else is there, as it may be mistyped. One that is written to says nothing."""
    with SoftContextStore(tmp_path, bundle, collection="manuals") as right:
        right.ensure([passage(0)], ["p0"])
        assert right.get(["p1"]) == [None] and mark_texts(right, [passage(1)], on_missing="text") == [passage(1)]
    with SoftContextStore(tmp_path, bundle, collection="new") as filled:
        mark_texts(filled, [passage(1)], on_missing="compress")
    assert not caplog.records
    with SoftContextStore(tmp_path, bundle, collection="manual") as mistyped:
        for n in range(2):
            with suppress(MissingPassageError):
                mistyped.marker("p0", 4) if policy is None else mark_texts(mistyped, [passage(n)], on_missing=policy)
    [said] = [record.getMessage() for record in caplog.records]
    assert str(tmp_path) in said and "'manual-ctx'" in said and "manuals-ctx" in said


def test_a_marker_of_another_place_may_mean_that_the_path_is_mistyped(
    store: SoftContextStore,
    bundle: WordBundle,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.ensure([passage(0)], ["p0"])
    marker = store.marker("p0", 4)
    with SoftContextStore(tmp_path / "mistyped", bundle) as other:
        with pytest.raises(UnreadableMarkerError):
            other.split(marker, on_unreadable="error")
        assert str(tmp_path / "mistyped") in caplog.text
        other.ensure([passage(1)], ["p1"])

    def fails(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(chromadb.Collection, "count", fails)
    with SoftContextStore(tmp_path / "mistyped", bundle) as other, pytest.raises(UnreadableMarkerError):
        other.split(marker, on_unreadable="error")


def test_a_server_that_forbids_to_list_collections_does_not_hide_a_missing_passage(
    tmp_path: Path, bundle: WordBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise ChromaAuthError

    monkeypatch.setattr("chromadb.api.client.Client.list_collections", forbidden)
    with SoftContextStore(tmp_path, bundle) as store:
        store.ensure([passage(0)], ["p0"])
        store.delete(["p0"])
        with pytest.raises(MissingPassageError):
            store.marker("p0", 4)


def test_passages_of_similar_length_are_compressed_together(
    tmp_path: Path, bundle: WordBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a batch has little padding; the longest come first."""
    read: list[int] = []
    compress = bundle.compress
    monkeypatch.setattr(bundle, "compress", lambda texts, ratio: read.extend(map(len, texts)) or compress(texts, ratio))
    texts = [f"word{i} " * (1 + i % 7) for i in range(600)]
    with SoftContextStore(tmp_path, bundle) as store:
        store.add(texts, progress=False)
        assert read == sorted(map(len, texts), reverse=True)
        read = store.read([store.split(m)[0] for m in store.markers(store.ensure(texts[:5]), 4)])
        assert [each.text for each in read] == texts[:5]


def test_passages_come_back_with_their_text(store: SoftContextStore) -> None:
    text = "Größe ≠ \0 taille 𝄞\r\n  two  spaces "
    store.add([Passage(text, "a", {"source": "x.txt", "page": 3, "tags": ["a"]})], progress=False)
    expected = StoredPassage("a", text, {"source": "x.txt", "page": 3}, 2, 7)
    assert store.get_passages(["b", "a"]) == [None, expected]


def test_more_ids_than_one_query_takes(store: SoftContextStore) -> None:
    add(store, 600)
    ids = [f"p{i}" for i in range(600)]
    assert all(store.get(ids[::-1]))
    assert store.get(["none"] * 40_000) == [None] * 40_000
    assert store.stored_ids([passage(i) for i in range(600)], ids) == ids
    assert store.delete([*ids[:300], *ids[:10], "none"]) == 300
    assert len(store) == 300


def test_every_kind_of_document(store: SoftContextStore) -> None:
    documents = [
        passage(0),
        Passage(passage(1), "mine", {"source": "p"}),
        Document(page_content=passage(2), id="doc", metadata={"source": "d"}),
        NodeWithScore(node=TextNode(text=passage(3), id_="node", metadata={"source": "n"}), score=0.5),
        Document(page_content=passage(0), id=""),  # no id: the same text is the same passage
    ]
    assert store.add(documents, progress=False).added == 4
    kept = [
        (each.text, each.metadata)
        for each in store.get_passages([passage_content_id(passage(0)), "mine", "doc", "node"])
    ]
    assert kept == [(passage(n), {"source": name} if name else {}) for n, name in enumerate(["", "p", "d", "n"])]


def test_only_new_and_changed_texts_are_compressed(store: SoftContextStore, bundle: WordBundle) -> None:
    add(store, 5)
    bundle.calls.clear()
    texts = [passage(0), passage(99), passage(2), passage(3), passage(4), passage(5)]
    report = store.add(texts, [f"p{i}" for i in range(6)], progress=False)
    assert report == AddReport(added=1, updated=1, unchanged=4)
    assert bundle.calls == [[passage(99), passage(5)]]
    assert_same(store.get(["p1"])[0], bundle.at(passage(99), 4))
    assert store.get_passages(["p1"])[0].text == passage(99)


def test_changed_metadata_are_written_without_compressing(store: SoftContextStore, bundle: WordBundle) -> None:
    store.add([Passage(passage(0), "a", {"source": "old", "page": 1})], progress=False)
    bundle.calls.clear()
    report = store.add([Passage(passage(0), "a", {"source": "new"})], progress=False)
    assert report == AddReport(added=0, updated=1, unchanged=0)
    assert bundle.calls == []
    assert store.get_passages(["a"])[0].metadata == {"source": "new"}
    assert_same(store.get(["a"])[0], bundle.at(passage(0), 4))
    assert store.damaged() == []  # signed again
    assert store.add([Passage(passage(0), "a", {"source": "new"})], progress=False).unchanged == 1


def test_ensure_takes_repeats_and_keeps_metadata(store: SoftContextStore, bundle: WordBundle) -> None:
    store.add([Passage(passage(0), "a", {"source": "kept"})], progress=False)
    texts = [passage(0), passage(2), passage(2)]
    assert store.ensure(texts, ["a", "c", "c"]) == ["a", "c", "c"] == store.ensure(texts, ["a", "c", "c"])
    assert bundle.calls == [[passage(0)], [passage(2)]]
    assert store.get_passages(["a"])[0].metadata == {"source": "kept"}
    assert store.ensure([]) == store.stored_ids([]) == []
    excerpt, other = passage(0, 12), passage(3)
    assert store.ensure([excerpt, other, passage(0)], ["a"] * 3) == [
        passage_content_id(excerpt),
        passage_content_id(other),
        "a",
    ]
    assert store.ensure([passage(4), passage(5)], ["d", "d"]) == ["d", passage_content_id(passage(5))]
    asked = [passage(0), excerpt, passage(5), passage(6)]
    assert store.stored_ids(asked, ["a", "a", "d", "d"]) == [
        "a",
        passage_content_id(excerpt),
        passage_content_id(passage(5)),
        None,
    ]


def test_an_excerpt_of_anothers_passage_hides_it_from_nobody(store: SoftContextStore) -> None:
    store.add([passage(1)], ["b"], progress=False)
    excerpt = passage(1, words=12)
    assert store.ensure([excerpt], ["b"], scope="alice") == [passage_content_id(excerpt)]
    assert store.get_passages(["b"], scope="alice")[0].text == passage(1)
    assert store.get_passages([passage_content_id(excerpt)]) == [None]


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


@pytest.mark.parametrize(
    ("documents", "ids", "message"),
    [
        (["good", " \n\t"], ["a", "b"], "passage 'b' has no text"),
        (["good", None], None, "NoneType"),
        (["good", Passage(5, "five")], None, "'five' has a text of type int"),  # type: ignore[arg-type]
        (["good", Passage("five", "five", 5)], None, "'five' has metadata of type int"),  # type: ignore[arg-type]
        (["good", "\ud800"], None, r"documents\[1\] is not valid Unicode"),
        (["good", "more"], ["a", ""], "non-empty"),
        (["good", "more"], ["a", "a"], "'a' is given twice"),
        (["good", "good"], ["a", "a"], "'a' is given twice"),
        (["good", "more"], ["a"], "1 ids for 2 documents"),
        ({"ids": ["a"], "documents": ["of a collection's get"]}, None, "got dict.*give its chromadb collection"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    store: SoftContextStore, documents: Any, ids: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        store.add(documents, ids, progress=False)
    assert len(store) == 0
    assert add(store, 2).added == 2


class BrokenBundle(WordBundle):
    def compress(self, texts: list[str], ratio: int | None = None) -> list[SoftContext]:
        softs = super().compress(texts, ratio)
        for text, soft in zip(texts, softs, strict=True):
            if "nan" in text.split():
                soft.slots[0, 0] = np.nan
        return softs


def test_nan_slots_are_refused_and_the_store_goes_on(tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, BrokenBundle()) as store:
        add(store, 3)
        with pytest.raises(PayloadError, match=r"'bad'.*NaN"):
            store.add(["fine words", "nan words"], ["fine", "bad"], progress=False)
        assert store.get(["bad"]) == [None]
        assert store.add(["fine words"], ["fine"], progress=False).added == 1
        assert all(store.get(["p0", "p1", "p2", "fine"]))


def test_another_bundle_is_refused(tmp_path: Path, bundle: WordBundle) -> None:
    with SoftContextStore(tmp_path, bundle) as store:
        add(store, 1)
    other = WordBundle("other")
    with pytest.raises(FingerprintMismatchError, match=r"'words'.*'other'.*index again") as caught:
        SoftContextStore(tmp_path, other)
    assert bundle.fingerprint[:12] in str(caught.value)
    with SoftContextStore(tmp_path, other, collection="second") as store:
        assert add(store, 1).added == 1


@pytest.mark.parametrize(
    "changed", [{"fingerprint": 5}, {"codec": 5}, {"bundle": ""}, {"base_ratio": "4"}, {"base_ratio": 0}]
)
def test_a_store_whose_settings_were_changed_is_refused(
    tmp_path: Path, bundle: WordBundle, changed: dict[str, Any]
) -> None:
    client = chromadb.PersistentClient(tmp_path)
    add(SoftContextStore(client, bundle), 1)
    [collection] = client.list_collections()
    collection.modify(metadata={**(collection.metadata or {}), **changed})
    with pytest.raises(StoreError, match=f"has no valid {next(iter(changed))}"):
        SoftContextStore(client, bundle)


def test_what_is_no_store_is_refused(tmp_path: Path, bundle: WordBundle) -> None:
    client = chromadb.PersistentClient(tmp_path / "app")
    client.create_collection("passages-ctx", embedding_function=None)
    with pytest.raises(StoreError, match="not a store"):
        SoftContextStore(client, bundle)
    (tmp_path / "file").write_text("x")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "chroma.sqlite3").write_text("no database " * 100)
    for location in (tmp_path / "file", tmp_path / "bad", ""):
        with pytest.raises(StoreError, match=r"file|folder|database"):
            SoftContextStore(location, bundle)
    with pytest.raises(ConfigError, match="int"):
        SoftContextStore(3, bundle)
    with pytest.raises(StoreError, match="cannot make the folder"):
        add(SoftContextStore(tmp_path / "file" / "store", bundle), 1)


def test_a_collection_that_the_app_deletes_is_gone(bundle: WordBundle) -> None:
    client = chromadb.EphemeralClient()
    store = SoftContextStore(client, bundle, collection="deleted")
    add(store, 1)
    client.delete_collection("deleted-ctx")
    with pytest.raises(StoreError, match="a collection in memory is gone"):
        store.get(["p0"])


def test_a_client_with_other_settings_is_left_alone(tmp_path: Path, bundle: WordBundle) -> None:
    settings = chromadb.Settings(allow_reset=True)
    client = chromadb.PersistentClient(str(tmp_path), settings=settings)
    assert add(SoftContextStore(tmp_path, bundle), 1).added == 1
    assert add(SoftContextStore(client, bundle), 2) == AddReport(added=1, updated=0, unchanged=1)
    assert client.get_collection("passages-ctx", embedding_function=None).count() == 2


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


def test_a_closed_store_says_so(tmp_path: Path, bundle: WordBundle) -> None:
    store = SoftContextStore(tmp_path, bundle)
    add(store, 1)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get(["p0"])
    with pytest.raises(StoreError, match="closed"):
        add(store, 1)


def test_a_store_keeps_the_codec_and_the_ratio_it_was_made_with(tmp_path: Path) -> None:
    bundle = WordBundle(nestable=False)
    with SoftContextStore(tmp_path, bundle, codec="fp16", ratio=8) as store:
        add(store, 1)
        with pytest.raises(RatioError, match="cannot be merged"):
            store.markers(["p0"], 16)
    with SoftContextStore(tmp_path, bundle) as again:
        assert (again.info().codec, again.base_ratio) == ("fp16", 8)
        add(again, 2)
        for number, soft in enumerate(again.get(["p0", "p1"])):
            assert_same(soft, bundle.at(passage(number), 8), tolerance=1e-3)
    for name, asked, found in (
        ("codec", "int8", "'fp16': leave codec='int8' out"),
        ("ratio", 4, "has ratio 8: leave ratio=4 out"),
    ):
        with pytest.raises(StoreError, match=found):
            SoftContextStore(tmp_path, bundle, **{name: asked})
