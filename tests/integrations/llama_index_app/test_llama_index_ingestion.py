"""Soft contexts made at ingestion: questions wait for none, and nothing is compressed twice."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.schema import Document, ImageNode, NodeRelationship, TextNode
from llama_index.vector_stores.chroma import ChromaVectorStore

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.store import SoftContextStore
from helpers.llama_index import PASSAGES, QUESTION, App, HashedWords, index_in
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor, CompressSoftContext, restore_sources

TEXT = " ".join(PASSAGES)


@pytest.fixture
def collection(tmp_path: Path) -> chromadb.Collection:
    return chromadb.PersistentClient(path=str(tmp_path / "chroma")).create_collection("docs")


@pytest.fixture
def store(collection: chromadb.Collection, app: App) -> Iterator[SoftContextStore]:
    with SoftContextStore(collection, app.bundle) as store:
        yield store


def pipeline(store: SoftContextStore, collection: chromadb.Collection | None = None, **arguments: Any) -> Any:
    vectors = None if collection is None else ChromaVectorStore(chroma_collection=collection)
    splitter = TokenTextSplitter(chunk_size=40, chunk_overlap=0)
    steps = [splitter, CompressSoftContext(store=store), HashedWords()]
    return IngestionPipeline(transformations=steps, vector_store=vectors, **arguments)


@pytest.mark.parametrize("way", ["run", "arun"])
async def test_after_ingestion_a_question_compresses_nothing(
    store: SoftContextStore, collection: chromadb.Collection, compressed: list[str], way: str
) -> None:
    documents = [Document(text=TEXT, metadata={"file": "velmora.txt"})]
    ingestion = pipeline(store, collection)
    nodes = await ingestion.arun(documents=documents) if way == "arun" else ingestion.run(documents=documents)
    assert len(nodes) > 1 and sorted(compressed) == sorted(node.text for node in nodes)
    assert sorted(store.ids()) == sorted(node.node_id for node in nodes)
    stored = store.get_passages([node.node_id for node in nodes])
    assert all(passage and passage.metadata == {"file": "velmora.txt"} for passage in stored)

    del compressed[:]
    postprocessor = CompressedContextPostprocessor(store, ratio=8, on_missing="error")
    engine = index_in(collection).as_query_engine(
        llm=CompressedContextLLM(store=store, max_tokens=4), similarity_top_k=2, node_postprocessors=[postprocessor]
    )
    response = await engine.aquery(QUESTION)
    assert compressed == []
    sources = {node.node_id: node for node in nodes}
    for found in restore_sources(response):
        source = sources[found.node_id]
        assert (found.text, found.metadata) == (source.text, source.metadata)
        assert found.score is not None and found.node.ref_doc_id == documents[0].doc_id


def test_nodes_pass_through_as_they_are(store: SoftContextStore, compressed: list[str]) -> None:
    nodes = [
        TextNode(id_="a", text=PASSAGES[0], metadata={"page": 3}, embedding=[0.5]),
        TextNode(id_="blank", text=" \n"),
        ImageNode(id_="image", text="a caption", image_url="http://localhost/x.png"),
        Document(id_="doc", text=PASSAGES[1]),
        TextNode(id_="a", text=PASSAGES[0]),  # a loader may give the same twice
    ]
    nodes[0].relationships[NodeRelationship.NEXT] = nodes[3].as_related_node_info()
    before = [node.model_dump() for node in nodes]
    step = CompressSoftContext(store=store)
    assert step(nodes) is nodes is step(nodes)
    assert [node.model_dump() for node in nodes] == before
    assert sorted(store.ids()) == ["a", "doc"] and sorted(compressed) == sorted(PASSAGES[:2])
    assert step([]) == []
    with pytest.raises(ConfigError, match="'a' is given twice"):
        step([nodes[0], TextNode(id_="a", text=PASSAGES[3])])
    with pytest.raises(ConfigError, match="without num_workers"):
        pipeline(store).run(documents=[Document(text=TEXT), Document(text=PASSAGES[0])], num_workers=2)


def test_a_cached_pipeline_still_fills_a_new_store(
    store: SoftContextStore, app: App, tmp_path: Path, compressed: list[str]
) -> None:
    """LlamaIndex skips a step whose result it has; the store is not part of that result."""
    documents = [Document(id_="d", text=TEXT)]
    first = pipeline(store)
    nodes = first.run(documents=documents)
    first.persist(str(tmp_path / "pipeline"))
    store.delete(store.ids())
    assert [node.text for node in first.run(documents=documents)] == [node.text for node in nodes]
    assert len(store) == len(nodes)
    with SoftContextStore(tmp_path / "second", app.bundle) as second:
        again = pipeline(second)
        again.load(str(tmp_path / "pipeline"))
        del compressed[:]
        cached = again.run(documents=documents)
        assert sorted(second.ids()) == sorted(node.node_id for node in cached)
        assert len(compressed) == len(nodes)
