"""The LlamaIndex postprocessor: nodes in, nodes with markers out, and back to their sources."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.schema import Document, ImageNode, MetadataMode, NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.workflow import JsonSerializer

from ctx_compress_rag.errors import ConfigError, MissingExtraError, MissingPassageError
from ctx_compress_rag.store import SoftContextStore
from helpers.llama_index import PASSAGES, QUESTION, RATIO, App, check_sources
from llama_index.llms.ctx_compress import marker_tokenizer
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor, CompressedTextNode, restore_sources


@pytest.fixture
def empty(tmp_path: Path, app: App) -> Iterator[SoftContextStore]:
    with SoftContextStore(tmp_path / "chroma", app.bundle) as store:
        yield store


@pytest.fixture
def nodes(app: App) -> list[NodeWithScore]:
    return app.nodes()


def test_only_the_llm_sees_the_marker(app: App, nodes: list[NodeWithScore]) -> None:
    before = [node.model_dump() for node in nodes]
    new = app.postprocessor().postprocess_nodes(nodes, query_str=QUESTION)
    assert [node.model_dump() for node in nodes] == before
    check_sources(new, nodes)
    for old, node in zip(nodes, new, strict=True):
        for mode in (MetadataMode.ALL, MetadataMode.EMBED, MetadataMode.NONE):
            assert node.node.get_content(mode) == old.node.get_content(mode)
            if hasattr(TextNode, "get_content_blocks"):  # newer versions of llama-index-core
                assert node.node.get_content_blocks(mode) == old.node.get_content_blocks(mode)
        assert (node.text, node.node.hash, str(node)) == (old.text, old.node.hash, str(old))
        assert node.node.relationships == old.node.relationships
        shown = node.node.get_content(MetadataMode.LLM)
        metadata = "" if node.node_id == "n0" else f"page: p{node.node_id[1:]}\n\n"
        marker = app.store.marker(node.node_id, RATIO)
        assert shown == metadata + marker
        if hasattr(TextNode, "get_content_blocks"):
            assert [block.text for block in node.node.get_content_blocks(MetadataMode.LLM)][-1] == marker
        assert app.slots(shown) == [-(-app.tokens(old.text) // RATIO)]


async def test_async_gives_the_same(app: App, nodes: list[NodeWithScore]) -> None:
    assert await app.postprocessor().apostprocess_nodes(nodes) == app.postprocessor().postprocess_nodes(nodes)


def test_what_is_missing(app: App, empty: SoftContextStore, nodes: list[NodeWithScore]) -> None:
    with pytest.raises(MissingPassageError, match=nodes[0].node_id):
        CompressedContextPostprocessor(empty, on_missing="error").postprocess_nodes(nodes)
    assert CompressedContextPostprocessor(empty, on_missing="text").postprocess_nodes(nodes) == nodes
    assert len(empty) == 0
    [first] = CompressedContextPostprocessor(empty).postprocess_nodes(nodes[:1])
    assert empty.ids() == [nodes[0].node_id]
    assert first.node.get_content(MetadataMode.LLM) == empty.marker(nodes[0].node_id, 4)
    mixed = CompressedContextPostprocessor(empty, on_missing="text").postprocess_nodes(nodes)
    assert [isinstance(node.node, CompressedTextNode) for node in mixed] == [True, False, False]
    changed = [NodeWithScore(node=TextNode(id_=nodes[0].node_id, text="Another text under this id."), score=0.1)]
    with pytest.raises(MissingPassageError, match="with this text"):
        CompressedContextPostprocessor(empty, on_missing="error").postprocess_nodes(changed)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("then", [False, True])
def test_marking_twice_is_marking_once(app: App, nodes: list[NodeWithScore], first: bool, then: bool) -> None:
    once = app.postprocessor(ratio=4, replace_text=first).postprocess_nodes(nodes)
    twice = app.postprocessor(ratio=16, replace_text=then).postprocess_nodes(once)
    assert twice == app.postprocessor(ratio=16, replace_text=then).postprocess_nodes(nodes)
    passages = app.store.get_passages([node.node_id for node in nodes])
    assert [passage and passage.text for passage in passages] == [node.text for node in nodes]


def test_sources_are_restored(app: App, nodes: list[NodeWithScore]) -> None:
    for replace_text in (False, True):
        new = app.postprocessor(replace_text=replace_text, scope="t").postprocess_nodes(nodes)
        restored = restore_sources(new, app.store, scope="t")
        assert restored == nodes
        assert restore_sources(restored, app.store, scope="t") == nodes
    assert restore_sources(new) == new  # replaced text without a store
    assert restore_sources(new, app.store, scope="other") == new


def test_what_is_not_text_passes_through(app: App) -> None:
    image = NodeWithScore(node=ImageNode(text="a caption", image_url="http://localhost/x.png"), score=0.3)
    blank = NodeWithScore(node=TextNode(text="  "), score=0.2)
    assert app.postprocessor().postprocess_nodes([image, blank]) == [image, blank]
    assert app.postprocessor().postprocess_nodes([]) == []


def test_documents_and_templates(empty: SoftContextStore) -> None:
    document = Document(
        id_="d", text=PASSAGES[0], metadata={"file": "a.txt"}, text_template="<{metadata_str}> {content}"
    )
    [new] = CompressedContextPostprocessor(empty, ratio=16).postprocess_nodes(
        [NodeWithScore(node=document, score=None)]
    )
    assert new.node.get_content(MetadataMode.LLM) == f"<file: a.txt> {empty.marker('d', 16)}"
    assert (new.score, new.get_content(), restore_sources([new])[0].node) == (None, PASSAGES[0], document)
    [replaced] = CompressedContextPostprocessor(empty, replace_text=True).postprocess_nodes(
        [NodeWithScore(node=document)]
    )
    assert isinstance(replaced.node, Document)
    assert (replaced.node.text, document.text) == (empty.marker("d", 4), PASSAGES[0])


def test_a_text_changed_afterwards_is_sent_as_text(app: App, nodes: list[NodeWithScore]) -> None:
    new = app.postprocessor().postprocess_nodes(nodes)
    for node in MetadataReplacementPostProcessor(target_metadata_key="page").postprocess_nodes(new):
        page = f"p{node.node_id[1:]}"
        assert node.node.get_content(MetadataMode.LLM) == (page if page == "p0" else f"page: {page}\n\n{page}")


def test_a_saved_node_is_the_plain_one(app: App, nodes: list[NodeWithScore]) -> None:
    docstore = SimpleDocumentStore()
    docstore.add_documents([node.node for node in app.postprocessor().postprocess_nodes(nodes)])
    again = SimpleDocumentStore.from_dict(docstore.to_dict())
    for old in nodes:
        loaded = again.get_node(old.node_id)
        assert type(loaded) is TextNode
        assert (loaded.text, loaded.metadata, loaded.relationships) == (
            old.text, old.metadata, old.node.relationships,
        )  # fmt: skip
        assert loaded.get_content(MetadataMode.LLM) == old.node.get_content(MetadataMode.LLM)


def test_a_node_in_the_context_of_a_workflow_is_saved_as_the_plain_one(app: App, nodes: list[NodeWithScore]) -> None:
    serializer = JsonSerializer()
    marked = [node.node for node in app.postprocessor().postprocess_nodes(nodes)]
    again = serializer.deserialize(serializer.serialize(marked))
    assert again == serializer.deserialize(serializer.serialize([node.node for node in nodes]))
    assert [type(node) for node in again] == [TextNode] * len(nodes)


# Budget


def shown(nodes: list[NodeWithScore]) -> list[str]:
    """What the LLM reads of each node, without metadata."""
    return [n.node.marker if isinstance(n.node, CompressedTextNode) else n.node.get_content() for n in nodes]


@pytest.mark.parametrize("budget", [3, 8, 17, 30, 45, 60, 10_000])
def test_a_budget_is_kept_as_the_llm_counts(app: App, nodes: list[NodeWithScore], budget: int) -> None:
    count = marker_tokenizer(app.store)
    texts = shown(app.postprocessor(token_budget=budget).postprocess_nodes(nodes))
    costs = [len(count(text)) for text in texts]
    assert sum(costs) <= budget
    in_prompt = app.answer("".join(texts)).prompt_tokens
    assert in_prompt <= budget + 3  # the tokenizer's BOS, and spaces that two neighbors may share or not
    full = [app.tokens(node.text) for node in nodes]
    if budget >= sum(full):
        assert texts == [node.text for node in nodes]
    # The nodes come best first: a better one keeps at least as much of itself.
    kept = [cost / whole for cost, whole in zip(costs, full, strict=True)]
    assert all(b <= a + 1 / w for a, b, w in zip(kept, kept[1:], full[1:], strict=False))


def test_a_budget_may_return_a_marked_node_to_its_text(app: App, nodes: list[NodeWithScore]) -> None:
    marked = app.postprocessor().postprocess_nodes(nodes)
    assert app.postprocessor(token_budget=10_000).postprocess_nodes(marked) == nodes


def test_what_is_no_scored_node_is_refused(app: App) -> None:
    node = TextNode(text=PASSAGES[0])
    calls: list[Callable[[], Any]] = [
        lambda: app.postprocessor().postprocess_nodes([node]),
        lambda: restore_sources([node], app.store),
        lambda: restore_sources(node, app.store),
        lambda: restore_sources("the answer", app.store),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="list of NodeWithScore is needed, got (TextNode|str)"):
            call()


def test_no_key_or_store_in_what_is_shown(app: App) -> None:
    postprocessor, llm = app.postprocessor(), app.llm()
    for thing in (postprocessor, llm):
        text = thing.to_json() + repr(thing) + str(thing.to_dict())
        assert "kkkk" not in text and "SoftContextStore" not in text
    assert CompressedContextPostprocessor.from_dict(postprocessor.to_dict(), store=app.store).ratio == RATIO
    assert type(llm).from_dict(llm.to_dict(), store=app.store).max_tokens == llm.max_tokens


@pytest.mark.parametrize("package", ["llama_index.postprocessor.ctx_compress", "llama_index.llms.ctx_compress"])
def test_without_llama_index_the_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(package):
            monkeypatch.delitem(sys.modules, name)
        elif name.startswith("llama_index.core"):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ctx-compress-rag\[llama-index\]'"):
        importlib.import_module(package)
