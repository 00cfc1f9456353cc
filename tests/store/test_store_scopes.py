"""Tenants of one store: none reads, writes over or deletes another's passages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctx_compress_rag.errors import ConfigError, MissingPassageError
from ctx_compress_rag.marking.mark import expand, mark_texts
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store import marker as markers
from ctx_compress_rag.store.record import owned_by_scope, passage_id, record_id
from helpers.store import WordBundle, add, assert_same, passage
from langchain_ctx_compress import CompressedContextPostprocessor


@pytest.fixture
def store(bundle: WordBundle) -> Iterator[SoftContextStore]:
    client = chromadb.EphemeralClient()
    yield SoftContextStore(client, bundle, collection="tenants")
    client.delete_collection("tenants-ctx")


def test_one_tenants_passages_are_not_there_for_another(store: SoftContextStore) -> None:
    store.add([passage(1)], ["a"], progress=False, scope="ann")
    marker = store.marker("a", 4, scope="ann")
    for tenant in ("bob", markers.DEFAULT_SCOPE):
        assert store.get(["a"], tenant) == store.get_passages(["a"], tenant) == [None]
        assert store.has([passage(1)], ["a"], tenant) == [False]
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
    assert store.text_of([marker]) == [passage(1)]
    store.delete(["a"], "ann")
    with pytest.raises(MissingPassageError):
        store.text_of([marker])


def test_a_tenants_marker_finds_its_own_record_first(store: SoftContextStore) -> None:
    for tenant in ("ann", markers.DEFAULT_SCOPE):
        store.add([passage(1)], ["a"], progress=False, scope=tenant)
    [marker] = store.split(store.marker("a", 4, "ann"), "ann")
    raw = chromadb.EphemeralClient().get_collection("tenants-ctx", embedding_function=None)
    raw.update(ids=[record_id("a", markers.DEFAULT_SCOPE)], metadatas=[{"payload": "damaged"}])
    assert store.text_of([marker]) == [passage(1)]
    assert_same(store.fetch([marker])[0], store.bundle.at(passage(1), 4))


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
        lambda: store.has([passage(0)], scope=scope),
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
