"""What a store is given: an app's collection, numbers, passages of any size, and tenants, who see only their own."""

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_chroma import Chroma

from ctx_compress_rag.errors import ConfigError, MissingPassageError, RatioError
from ctx_compress_rag.marking.mark import expand, mark_texts
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import AddReport, Passage, SoftContextStore, SyncReport
from ctx_compress_rag.store import marker as markers
from ctx_compress_rag.store.passage import MAX_CHARACTERS
from ctx_compress_rag.store.record import owned_by_scope, passage_id, record_id
from helpers.langchain import WordEmbeddings
from helpers.store import WordBundle, add, assert_same, passage
from langchain_ctx_compress import CompressedContextPostprocessor

KEY = b"sixteen bytes or more"


@pytest.fixture
def app(tmp_path: Path) -> Any:
    collection = chromadb.PersistentClient(str(tmp_path / "app")).create_collection("app")
    ids = [f"p{n}" for n in range(300)]
    collection.add(
        ids, [[0.0]] * 300, documents=[passage(n) for n in range(300)], metadatas=[{"n": n} for n in range(300)]
    )
    return collection


def test_sync_follows_a_collection(store: SoftContextStore, app: Any, bundle: WordBundle) -> None:
    app.add(["empty"], [[0.0]], metadatas=[{"n": -1}])  # a record without a text
    store.add(["a passage of somebody else"], ["p1"], scope="tenant", progress=False)
    assert store.sync(app, progress=False) == SyncReport(300, 0, 0, 0)
    assert store.add(app, progress=False) == AddReport(0, 0, 300)
    app.delete(["p0", "p1"])
    app.update(["p2"], [[0.0]], documents=["a text that changed"])
    app.add(["new"], [[0.0]], documents=["a new text"])
    assert store.sync(app, progress=False) == SyncReport(1, 1, 297, 2)
    assert sorted(store.ids()) == sorted(id for id in app.get()["ids"] if id != "empty")
    assert_same(store.get(["p2"])[0], bundle.at("a text that changed", 4))
    assert store.ids("tenant") == ["p1"]


def test_beside_langchain_chroma_at_a_relative_path(
    tmp_path: Path, bundle: WordBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vectors = Chroma("docs", WordEmbeddings(), persist_directory="./chroma")
    ids = vectors.add_texts([passage(0), passage(1)], [{"source": "0.txt"}, {"source": "1.txt"}])
    with SoftContextStore("./chroma", bundle, collection="docs") as store:
        for hit in vectors.similarity_search(passage(0), k=2):
            store.add([hit], progress=False)
            assert hit.metadata.keys() == {"source"}  # no payload travels with the app's hits
            assert_same(store.get([hit.id])[0], bundle.at(hit.page_content, 4))
        vectors.delete([ids[1]])
        assert len(vectors.get()["ids"]) == 1 and len(store) == 2
        # Both are called Chroma: the message says which one it is, and which is needed.
        with pytest.raises(ConfigError, match=r"langchain_chroma\S*Chroma is not a chromadb.Collection: give client"):
            store.sync(vectors)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"got Chroma: .* give its chromadb collection"):
            store.add(vectors)  # type: ignore[arg-type]


def test_sync_deletes_nothing_if_it_gets_the_soft_contexts_themselves(store: SoftContextStore, tmp_path: Path) -> None:
    store.add(["a passage"], ["p"], progress=False)
    companion = chromadb.PersistentClient(tmp_path / "chroma").get_collection(store.info().collection)
    with pytest.raises(ConfigError, match="holds soft contexts itself"):
        store.sync(companion)
    assert store.ids() == ["p"]


def test_sync_keeps_what_is_added_while_it_compresses(tmp_path: Path, app: Any) -> None:
    class Meanwhile(WordBundle):
        def compress(self, texts: Sequence[str], ratio: int | None = None) -> list[SoftContext]:
            app.upsert(["late"], [[0.0]], documents=["a late text"])
            other.add(["a late text"], ["late"], progress=False)
            return super().compress(texts, ratio)

    folder = tmp_path / "chroma"
    with SoftContextStore(folder, WordBundle()) as other, SoftContextStore(folder, Meanwhile()) as store:
        other.add(["an old text"], ["old"], progress=False)
        assert store.sync(app, progress=False).deleted == 1
        assert "late" in store.ids() and "old" not in store.ids()


def test_a_passage_of_megabytes_is_refused_before_work(store: SoftContextStore, bundle: WordBundle) -> None:
    with pytest.raises(ConfigError, match=r"'big' has 5,000,000 characters.*: cut it"):
        store.add(["fine", "word " * 1_000_000], ["small", "big"], progress=False)
    assert (len(store), bundle.calls) == (0, [])
    store.add(["w" * MAX_CHARACTERS], progress=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lock_timeout": "soon"},
        {"lock_timeout": math.nan},
        {"read_timeout": 0},
        {"read_timeout": 0.001},
        {"colection": "docs"},
        {"collection": None},
        {"collection": "two words"},
        {"collection": "x" * 600},
        {"ratio": True},
        {"ratio": "sixteen"},
        {"ratio": 0},
        {"ratio": 3},
        {"key": "a str of sixteen characters"},
        {"key": b"fifteen bytes.."},
        {"bundle": "a name"},
    ],
)
def test_an_impossible_option_is_refused_by_name_before_a_folder_is_made(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(
        (ConfigError, RatioError),
        match=f"{next(iter(wrong))}(=| is 16 bytes or more| . does not divide|'.* 'collection')",
    ):
        SoftContextStore(tmp_path / "new", **{"bundle": WordBundle()} | wrong)
    assert not (tmp_path / "new").exists()


def test_a_store_cannot_be_pickled_and_deep_copies_share_it(store: SoftContextStore) -> None:
    with pytest.raises(ConfigError, match="SoftContextStore cannot be pickled: open it"):
        pickle.dumps([store])
    assert copy.deepcopy({"store": store})["store"] is store


HUGE: Any = 10**5000
DEEP: Any = []
for _ in range(10_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value", [HUGE, -(2**63) - 1, DEEP, float("nan"), {"a": DEEP}, "half \ud83d"], ids=lambda _: ""
)
def test_metadata_that_json_cannot_hold_stay_in_the_app(store: SoftContextStore, value: Any) -> None:
    """Numbers of NumPy are stored as Python's."""
    given = {"page": 2**63 - 1, "kept": "é😀", "none": None, "yes": True}
    numbers = {"i": np.int64(3), "f": np.float32(0.5), "b": np.bool_(True), "s": np.str_("x"), "u": np.uint8(7)}
    store.add([Passage(passage(0), "a", {"odd": value, HUGE: 1, "\udfff": 1} | given | numbers)], progress=False)
    kept = store.get_passages(["a"])[0].metadata
    assert repr(sorted(kept.items())) == repr(sorted({**given, "i": 3, "f": 0.5, "b": True, "s": "x", "u": 7}.items()))


@pytest.mark.parametrize("ids", ["p0", "p", 5, None, ["half \ud83d"], [5], [DEEP], [b"p0"]], ids=lambda _: "")
def test_ids_that_are_none_are_refused_everywhere(store: SoftContextStore, ids: Any) -> None:
    add(store, 1)
    calls: list[Callable[[], object]] = [
        lambda: store.get(ids),
        lambda: store.get_passages(ids),
        lambda: store.delete(ids),
        lambda: store.markers(ids, 4),
    ]
    if ids is not None:
        calls += [lambda call=call: call([passage(1)], ids) for call in (store.stored_ids, store.ensure, store.add)]
    for call in calls:
        with pytest.raises(ConfigError):
            call()
    assert len(store) == 1


@pytest.mark.parametrize("texts", [5, None, range(3), "a text", [b"bytes"]], ids=repr)
def test_texts_that_are_none_are_refused_everywhere(store: SoftContextStore, texts: Any) -> None:
    for call in (store.stored_ids, store.ensure, store.add, lambda texts: store.get(["a"], texts=texts or 5)):
        with pytest.raises(ConfigError):
            call(texts)


def test_one_tenants_passages_are_not_there_for_another(store: SoftContextStore) -> None:
    store.add([passage(1)], ["a"], progress=False, scope="ann")
    marker = store.marker("a", 4, scope="ann")
    for tenant in ("bob", markers.DEFAULT_SCOPE):
        assert store.get(["a"], tenant) == store.get_passages(["a"], tenant) == [None]
        assert store.stored_ids([passage(1)], ["a"], tenant) == [None]
        assert store.ids(tenant) == []
        assert store.delete(["a"], tenant) == 0
        assert store.split(marker, tenant) == [marker]
        with pytest.raises(MissingPassageError, match="'a' is not stored"):
            store.marker("a", 4, tenant)
    assert store.ids("ann") == ["a"]
    assert store.delete(["a"], "ann") == 1


def test_a_tenants_marker_ends_with_its_own_passage(store: SoftContextStore) -> None:
    for tenant in ("ann", "bob"):
        store.add([passage(1)], ["a"], progress=False, scope=tenant)
    [marker] = store.split(store.marker("a", 4, "ann"), "ann")
    assert store.read([marker])[0].text == passage(1)
    store.delete(["a"], "ann")
    with pytest.raises(MissingPassageError):
        store.read([marker])


def test_a_tenants_marker_finds_its_own_record_first(store: SoftContextStore, tmp_path: Path) -> None:
    for tenant in ("ann", markers.DEFAULT_SCOPE):
        store.add([passage(1)], ["a"], progress=False, scope=tenant)
    [marker] = store.split(store.marker("a", 4, "ann"), "ann")
    raw = chromadb.PersistentClient(tmp_path / "chroma").get_collection("passages-ctx", embedding_function=None)
    raw.update(ids=[record_id("a", markers.DEFAULT_SCOPE)], metadatas=[{"payload": "damaged"}])
    [read] = store.read([marker])
    assert read.text == passage(1)
    assert_same(read.soft, store.bundle.at(passage(1), 4))


def test_what_has_no_scope_is_shared_and_a_tenants_own_comes_first(store: SoftContextStore, bundle: WordBundle) -> None:
    add(store, 2)
    bundle.calls.clear()
    assert mark_texts(store, [passage(0), passage(1)], ["p0", "p1"], scope="ann") == store.markers(
        ["p0", "p1"], 4, "ann"
    )
    assert bundle.calls == []
    store.add([passage(7)], ["p0"], progress=False, scope="ann")
    assert [found.text for found in store.get_passages(["p0", "p1"], "ann")] == [passage(7), passage(1)]
    assert store.get_passages(["p0"])[0].text == passage(0)
    assert store.get_passages(["p0"], "ann", [passage(0)])[0].text == passage(0)
    with markers.scope("ann"):
        assert_same(store.get(["p0"])[0], bundle.at(passage(7), 4))


def test_a_tenants_marker_in_a_shared_document_stays_with_the_tenant(store: SoftContextStore) -> None:
    store.add(["a secret of ann"], ["secret"], progress=False, scope="ann")
    shared = f"everyone reads this {store.marker('secret', 4, 'ann')}"
    [marked] = mark_texts(store, [shared], ["doc1"], ratio=4, scope="ann")
    assert expand(store, marked, "ann") == "everyone reads this a secret of ann"
    assert store.get_passages(["doc1"]) == store.get_passages(["doc1"], "bob") == [None]
    [theirs] = mark_texts(store, [shared], ["doc1"], ratio=4, scope="bob")
    assert expand(store, theirs, "bob") == shared
    assert store.ids() == []


@given(
    st.lists(
        st.tuples(st.text(max_size=50), st.sampled_from(["default", "ann", "ann/", "bob"])), min_size=2, unique=True
    )
)
def test_no_two_passages_share_a_record(pairs: list[tuple[str, str]]) -> None:
    pairs += [(record_id(id, scope), markers.DEFAULT_SCOPE) for id, scope in pairs]  # an id made to look like another's
    pairs = list(dict.fromkeys(pairs))
    keys = [record_id(id, scope) for id, scope in pairs]
    named = {key: pair for key, pair in zip(keys, pairs, strict=True)}
    assert len(named) == len(pairs)
    for key, (id, scope) in named.items():
        assert passage_id(key) == id and owned_by_scope(key, scope)
        assert not any(owned_by_scope(key, other) for other in {"default", "ann", "ann/", "bob"} - {scope})


@pytest.mark.parametrize("scope", ["", "  ", 5])
def test_a_scope_that_is_no_name_is_refused_everywhere(store: SoftContextStore, tmp_path: Path, scope: Any) -> None:
    add(store, 1)
    for refused in (
        lambda: SoftContextStore(tmp_path, store.bundle, scope=scope),
        lambda: store.add([passage(0)], scope=scope),
        lambda: store.ensure([passage(0)], scope=scope),
        lambda: store.get(["p0"], scope),
        lambda: store.get_passages(["p0"], scope),
        lambda: store.stored_ids([passage(0)], scope=scope),
        lambda: store.ids(scope),
        lambda: store.delete(["p0"], scope),
        lambda: store.markers(["p0"], 4, scope),
        lambda: store.split("text", scope),
        lambda: mark_texts(store, [passage(0)], scope=scope),
        lambda: expand(store, passage(0), scope),
        lambda: markers.scope(scope).__enter__(),
        lambda: CompressedContextPostprocessor(store=store, scope=scope),
    ):
        with pytest.raises(ConfigError, match="scope"):
            refused()
    assert len(store) == 1
