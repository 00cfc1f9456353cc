"""What a retriever may return, in both frameworks: passages that cannot be stored, excerpts, odd ids and metadata."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.documents import Document
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from ctx_compress_rag.errors import ConfigError, CtxCompressError, MissingPassageError
from ctx_compress_rag.marking.mark import expand, mark
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.passage import MAX_CHARACTERS, content_id
from helpers.store import WordBundle, passage
from langchain_ctx_compress import CompressedContextPostprocessor as LangChainPostprocessor
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor

GOOD = passage(0)
Ask = Callable[..., list[str]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SoftContextStore]:
    with SoftContextStore(tmp_path, WordBundle(), key=b"k" * 32) as made:
        made.add([GOOD], ["good"], progress=False)
        yield made


def langchain(store: SoftContextStore, passages: list[dict[str, Any]], **options: Any) -> list[str]:
    documents = [Document(p["text"], id=p["id"], metadata=p.get("metadata", {})) for p in passages]
    return [document.page_content for document in LangChainPostprocessor(store=store, **options).invoke(documents)]


def llama_index(store: SoftContextStore, passages: list[dict[str, Any]], **options: Any) -> list[str]:
    made = [TextNode(text=p["text"], id_=p["id"], metadata=p.get("metadata", {})) for p in passages]
    for node in made:
        node.excluded_llm_metadata_keys = list(node.metadata)
    nodes = CompressedContextPostprocessor(store, **options).postprocess_nodes([NodeWithScore(node=n) for n in made])
    return [node.node.get_content(MetadataMode.LLM) for node in nodes]


FRAMEWORKS = pytest.mark.parametrize("ask", [langchain, llama_index])


class Toneless(WordBundle):
    """Cannot compress one text."""

    def compress(self, texts: Any, ratio: int | None = None) -> Any:
        if "silence" in texts:
            raise ConfigError("'silence' has no tokens")
        return super().compress(texts, ratio)


@FRAMEWORKS
@pytest.mark.parametrize(
    ("text", "shown"),
    [("half an emoji \ud83d", "half an emoji \ufffd"), ("ab " * MAX_CHARACTERS, None), ("silence", None)],
    ids=["surrogate", "long", "no tokens"],
)
@pytest.mark.parametrize("policy", ["compress", "text", "error"])
def test_a_passage_that_cannot_be_stored_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ask: Ask, text: str, shown: str | None, policy: str
) -> None:
    with SoftContextStore(tmp_path, Toneless(), key=b"k" * 32) as store:
        store.add([GOOD], ["good"], progress=False)
        passages = [{"id": "bad", "text": text}, {"id": "good", "text": GOOD}, {"id": "new", "text": passage(1)}]
        if policy == "error":
            with pytest.raises(CtxCompressError, match="bad|documents"):
                ask(store, passages, on_missing=policy)
            return
        bad, good, new = ask(store, passages, on_missing=policy)
        assert bad == (text if shown is None else shown)
        assert good == store.marker("good", 4)
        assert new == (store.marker("new", 4) if policy == "compress" else passage(1))
        assert ("'bad'" in caplog.text) == (policy == "compress" or text != "silence")


@FRAMEWORKS
@pytest.mark.parametrize("id", ["", "x\ud83d"])
def test_an_id_that_no_passage_can_have_is_none(store: SoftContextStore, ask: Ask, id: str) -> None:
    passages = [{"id": id, "text": passage(1)}, {"id": "good", "text": GOOD}]
    assert ask(store, passages, on_missing="text") == [passage(1), store.marker("good", 4)]
    with pytest.raises(MissingPassageError, match="not stored"):
        ask(store, passages, on_missing="error")
    assert ask(store, passages) == store.markers([content_id(passage(1)), "good"], 4)


@FRAMEWORKS
def test_metadata_stay_the_apps(store: SoftContextStore, ask: Ask) -> None:
    """What cannot be copied, written or printed is not touched."""
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"deeper": deep}
    graph = torch.ones(2, requires_grad=True) * 2
    values = [threading.Lock(), (i for i in range(3)), open("/dev/null"), graph, 10**5000, deep, "\ud83d"]  # noqa: SIM115
    for value in values:
        passages = [{"id": "good", "text": GOOD, "metadata": {"value": value}}]
        assert ask(store, passages) == [store.marker("good", 4)]


def test_langchain_shares_values_and_not_the_mapping(store: SoftContextStore) -> None:
    lock = threading.Lock()
    given = Document(GOOD, id="good", metadata={"lock": lock})
    [marked] = LangChainPostprocessor(store=store).invoke([given])
    assert marked.metadata["lock"] is lock
    marked.metadata["seen"] = True
    assert given == Document(GOOD, id="good", metadata={"lock": lock})


def test_llama_index_shows_metadata_that_python_cannot_print(store: SoftContextStore) -> None:
    node = TextNode(text=GOOD, id_="good", metadata={"number": 10**5000})
    [marked] = CompressedContextPostprocessor(store).postprocess_nodes([NodeWithScore(node=node)])
    assert marked.node.get_content(MetadataMode.LLM).endswith(store.marker("good", 4))


@pytest.mark.parametrize(
    "score", [10**400, -(10**400), float("nan"), "high", None], ids=["huge", "low", "nan", "str", "none"]
)
def test_any_relevance_is_taken(store: SoftContextStore, score: Any) -> None:
    document = Document(GOOD, id="good", metadata={"relevance_score": score})
    [marked] = LangChainPostprocessor(store=store).invoke([document])
    assert marked.page_content == store.marker("good", 4)


NO_LISTS: list[dict[str, Any]] = [
    {"texts": "abc"},
    {"texts": 5},
    {"texts": [None]},
    {"ids": "a"},
    {"ids": 1},
    {"scores": "1"},
    {"scores": [1.0, 2.0]},
]


@pytest.mark.parametrize("wrong", NO_LISTS, ids=str)
def test_what_is_no_list_is_refused(store: SoftContextStore, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give"):
        mark(store, **{"texts": [GOOD], **wrong})


def test_iterators_are_lists(store: SoftContextStore) -> None:
    assert mark(store, iter([GOOD]), iter(["good"])) == [store.marker("good", 4)]  # type: ignore[arg-type]


@FRAMEWORKS
def test_an_excerpt_stands_beside_what_was_ingested(store: SoftContextStore, ask: Ask) -> None:
    """A step that shortens nodes for one question keeps their ids; forty questions at once, each with its excerpt."""
    store.add([Document(passage(1, 60), id="p", metadata={"page": 3})], progress=False)
    before = store.marker("p", 4)
    excerpts = [" ".join(passage(1, 60).split()[n : n + 12]) for n in range(40)]

    def question(n: int) -> bool:
        [marker] = ask(store, [{"id": "p", "text": excerpts[n]}])
        return expand(store, marker) == excerpts[n]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(question, range(40)))
    assert store.marker("p", 4) == before
    [record] = store.get_passages(["p"])
    assert record is not None and (record.text, record.metadata) == (passage(1, 60), {"page": 3})
    assert ask(store, [{"id": "p", "text": passage(1, 60)}]) == [before]
    assert ask(store, [{"id": "p", "text": excerpts[5]}], on_missing="error") == [
        store.marker(content_id(excerpts[5]), 4)
    ]
    assert store.add([passage(2)], ["p"], progress=False).updated == 1  # `add` alone replaces
    assert expand(store, store.marker("p", 4)) == passage(2)


@FRAMEWORKS
def test_an_id_with_several_texts_stands_for_the_stored_one(store: SoftContextStore, ask: Ask) -> None:
    """Two indexes that count from one, or a passage beside its excerpts."""
    passages = [{"id": "good", "text": text} for text in (passage(1), passage(2), GOOD, passage(1))]
    shown = ask(store, passages)
    assert [expand(store, text) for text in shown] == [each["text"] for each in passages]
    assert shown[2] == store.marker("good", 4)
    assert ask(store, passages, on_missing="error") == shown
