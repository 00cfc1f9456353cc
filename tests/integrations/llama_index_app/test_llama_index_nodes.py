"""The LlamaIndex postprocessor: nodes in, nodes with markers out, and back to their sources."""

from typing import Any

import pytest
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.schema import Document, ImageNode, MetadataMode, NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.workflow import JsonSerializer

from ctx_compress_rag.errors import MissingPassageError
from ctx_compress_rag.store import SoftContextStore
from helpers.llama_index import PASSAGES, QUESTION, RATIO, App, check_sources
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor, restore_sources

READS = [name for name in ("get_content", "get_content_blocks") if hasattr(TextNode, name)]  # blocks: newer versions


@pytest.fixture
def nodes(app: App) -> list[NodeWithScore]:
    return app.nodes()


async def test_only_the_llm_sees_the_marker(app: App, nodes: list[NodeWithScore]) -> None:
    before = [node.model_dump() for node in nodes]
    new = app.postprocessor().postprocess_nodes(nodes, query_str=QUESTION)
    assert await app.postprocessor().apostprocess_nodes(nodes) == new
    assert [node.model_dump() for node in nodes] == before
    check_sources(new, nodes)
    for old, node in zip(nodes, new, strict=True):
        for mode in (MetadataMode.ALL, MetadataMode.EMBED, MetadataMode.NONE):
            for read in READS:
                assert getattr(node.node, read)(mode) == getattr(old.node, read)(mode)
        assert (node.text, node.node.hash, str(node)) == (old.text, old.node.hash, str(old))
        assert node.node.relationships == old.node.relationships
        metadata = "" if node.node_id == "n0" else f"page: p{node.node_id[1:]}\n\n"
        marker = app.store.marker(node.node_id, RATIO)
        assert node.node.get_content(MetadataMode.LLM) == metadata + marker
        assert len(READS) == 1 or node.node.get_content_blocks(MetadataMode.LLM)[-1].text == marker
        assert app.slots(marker) == [-(-app.tokens(old.text) // RATIO)]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("then", [False, True])
def test_text_is_replaced_and_restored(app: App, nodes: list[NodeWithScore], first: bool, then: bool) -> None:
    once = app.postprocessor(ratio=4, replace_text=first, scope="t").postprocess_nodes(nodes)
    again = app.postprocessor(ratio=16, replace_text=then, scope="t")
    assert again.postprocess_nodes(once) == again.postprocess_nodes(nodes)
    assert restore_sources(once, app.store, scope="t") == nodes
    assert restore_sources(once) == restore_sources(once, app.store, scope="other") == nodes


def test_a_deleted_replaced_text_cannot_be_restored(app: App, nodes: list[NodeWithScore], tmp_path: Any) -> None:
    with SoftContextStore(tmp_path, app.bundle) as store:
        kept = CompressedContextPostprocessor(store).postprocess_nodes(nodes)
        replaced = CompressedContextPostprocessor(store, replace_text=True).postprocess_nodes(nodes)
        saved = [NodeWithScore(node=TextNode.from_dict(each.node.to_dict())) for each in replaced]
        assert restore_sources(saved, store)[0].get_content() == nodes[0].get_content()
        store.delete(["n0"])
        assert restore_sources(kept, store) == restore_sources(replaced, store) == nodes  # they carry their sources
        with pytest.raises(MissingPassageError, match="deleted"):
            restore_sources(saved, store)


def test_what_is_not_text_passes_through(app: App) -> None:
    image = NodeWithScore(node=ImageNode(text="a caption", image_url="http://localhost/x.png"), score=0.3)
    blank = NodeWithScore(node=TextNode(text="  "), score=0.2)
    assert app.postprocessor().postprocess_nodes([image, blank]) == [image, blank]


def test_documents_and_templates(app: App) -> None:
    document = Document(
        id_="n0", text=PASSAGES[0], metadata={"file": "a.txt"}, text_template="<{metadata_str}> {content}"
    )
    [new] = app.postprocessor(ratio=16).postprocess_nodes([NodeWithScore(node=document)])
    assert new.node.get_content(MetadataMode.LLM) == f"<file: a.txt> {app.store.marker('n0', 16)}"
    assert (new.score, new.get_content(), restore_sources([new])[0].node) == (None, PASSAGES[0], document)
    [replaced] = app.postprocessor(replace_text=True).postprocess_nodes([NodeWithScore(node=document)])
    assert isinstance(replaced.node, TextNode)
    assert (replaced.node.text, document.text) == (app.store.marker("n0", RATIO), PASSAGES[0])


def test_a_text_changed_afterwards_is_sent_as_text(app: App, nodes: list[NodeWithScore]) -> None:
    new = app.postprocessor().postprocess_nodes(nodes)
    for node in MetadataReplacementPostProcessor(target_metadata_key="page").postprocess_nodes(new):
        page = f"p{node.node_id[1:]}"
        assert node.node.get_content(MetadataMode.LLM) == (page if page == "p0" else f"page: {page}\n\n{page}")


def test_a_saved_node_is_the_plain_one(app: App, nodes: list[NodeWithScore]) -> None:
    """In a docstore, and in the context of a workflow."""
    marked = [node.node for node in app.postprocessor().postprocess_nodes(nodes)]
    docstore = SimpleDocumentStore()
    docstore.add_documents(marked)
    again = SimpleDocumentStore.from_dict(docstore.to_dict())
    for old in nodes:
        loaded = again.get_node(old.node_id)
        assert type(loaded) is TextNode
        assert (loaded.text, loaded.metadata, loaded.relationships) == (
            old.text, old.metadata, old.node.relationships,
        )  # fmt: skip
        assert loaded.get_content(MetadataMode.LLM) == old.node.get_content(MetadataMode.LLM)
    serializer = JsonSerializer()
    passed = serializer.deserialize(serializer.serialize(marked))
    assert passed == serializer.deserialize(serializer.serialize([node.node for node in nodes]))
