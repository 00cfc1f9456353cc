"""The LlamaIndex LLM, whose answers are the decoder's own; the postprocessor; soft contexts made at ingestion."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import Document, ImageNode, MetadataMode, NodeRelationship, NodeWithScore, TextNode
from llama_index.vector_stores.chroma import ChromaVectorStore

from ctx_compress_rag.errors import ConfigError, MissingPassageError
from ctx_compress_rag.store import SoftContextStore
from helpers.llama_index import MAX_TOKENS, PASSAGES, QUESTION, RATIO, App, HashedWords, check_sources, index_in
from llama_index.llms.ctx_compress import CompressedContextLLM, chat_memory, marker_tokenizer
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor, CompressSoftContext, restore_sources


@pytest.fixture
def llm(app: App) -> CompressedContextLLM:
    return app.llm()


@pytest.fixture
def prompt(app: App) -> str:
    return f"Context: {app.store.marker('n0', 4)} and {app.store.marker('n3', RATIO)}\nQuestion: {QUESTION}"


async def test_every_way_to_ask_gives_one_answer(app: App, llm: CompressedContextLLM, prompt: str) -> None:
    message = [ChatMessage(role="user", content=prompt)]
    direct = app.answer([{"role": "user", "content": prompt}])
    assert direct.slots == sum(app.slots(prompt)) > 0
    complete, chat = llm.complete(prompt), llm.chat(message)
    assert complete.text == chat.message.content == direct.text
    assert complete.raw == chat.raw == {
        "usage": {
            "prompt_tokens": direct.prompt_tokens,
            "completion_tokens": direct.completion_tokens,
            "total_tokens": direct.prompt_tokens + direct.completion_tokens,
        },
        "slots": direct.slots,
        "finish_reason": direct.finish_reason,
    }  # fmt: skip
    assert chat.message.additional_kwargs == {}
    assert llm.complete(prompt, stop=["never there", direct.text[4:7]]).raw["finish_reason"] == "stop"
    assert await llm.acomplete(prompt) == complete
    assert await llm.achat(message) == chat
    streams = [
        list(llm.stream_complete(prompt)),
        list(llm.stream_chat(message)),
        [response async for response in await llm.astream_complete(prompt)],
        [response async for response in await llm.astream_chat(message)],
    ]
    for stream in streams:
        assert "".join(response.delta or "" for response in stream) == direct.text
        text = ""
        for response in stream:
            text += response.delta or ""
            assert (response.text if hasattr(response, "text") else response.message.content) == text
        assert [response.raw for response in stream] == [None] * (len(stream) - 1) + [complete.raw]


def test_a_formatted_prompt_is_used_as_it_is(app: App, llm: CompressedContextLLM, prompt: str) -> None:
    direct, raw = app.answer(prompt), llm.complete(prompt, formatted=True)
    assert (raw.text, raw.raw["usage"]["prompt_tokens"]) == (direct.text, direct.prompt_tokens)
    assert direct.prompt_tokens < llm.complete(prompt).raw["usage"]["prompt_tokens"]


def test_metadata_and_an_image(llm: CompressedContextLLM) -> None:
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (1024, MAX_TOKENS, "tiny")
    assert metadata.is_chat_model and not metadata.is_function_calling_model
    with pytest.raises(ConfigError, match="image block"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")])])


def test_markers_of_a_scope_count_as_their_slots(app: App) -> None:
    marker, slots = app.store.marker("n2", 4, "a"), -(-app.tokens(PASSAGES[2]) // 4)
    assert len(marker_tokenizer(app.store, scope="a")(marker)) == slots < len(marker_tokenizer(app.store)(marker))


PIECES = st.lists(
    st.tuples(st.sampled_from(range(len(PASSAGES))), st.sampled_from([4, 8, 12, 16, 64]), st.text(max_size=10)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=10)
@given(pieces=PIECES, window=st.integers(60, 300), overlap=st.sampled_from([0.0, 0.1]))
def test_no_marker_is_cut_where_chunks_end(app: App, pieces: Any, window: int, overlap: float) -> None:
    """Whatever LlamaIndex packs: each chunk fits as the decoder counts it, every marker is whole."""
    helper = PromptHelper(context_window=window, num_output=12, chunk_overlap_ratio=overlap)
    texts = [f"{said} {app.store.marker(f'n{number}', ratio)}" for number, ratio, said in pieces]
    template, room = PromptTemplate("Context: {context_str}"), window - 12
    packed = helper.repack(template, texts)
    for chunk in packed:
        assert len(marker_tokenizer(app.store)(template.format(context_str=chunk))) <= room
        assert chunk.count("[[ctx:") == len(app.slots(chunk)) + sum(said.count("[[ctx:") for *_, said in pieces)
    found = [sum(app.slots(chunk)) for chunk in packed]
    assert sum(found) >= sum(sum(app.slots(text)) for text in texts)


def test_a_long_chat_in_a_small_window_needs_a_shorter_memory(app: App) -> None:
    """LlamaIndex's own lets the history fill the window."""

    def talk(llm: Any, **memory: Any) -> None:
        engine = app.index.as_chat_engine("context", llm=llm, node_postprocessors=[app.postprocessor()], **memory)
        for turn in range(6):
            engine.chat(f"{turn}: {QUESTION} {'Say more. ' * 12}")

    llm = app.llm()
    with pytest.raises(ValueError, match="is not positive"):
        talk(llm)
    talk(llm, memory=chat_memory(llm))
    with pytest.raises(ConfigError, match="max_tokens=600.* smaller max_tokens"):
        chat_memory(app.llm(max_tokens=600))


def test_a_memory_counts_markers_as_slots(app: App) -> None:
    llm, marker = app.llm(), app.store.marker("n0", 4)
    [slots] = app.slots(marker)
    memory = chat_memory(llm, token_limit=10 * slots, chat_history_token_ratio=1.0)
    for turn in range(30):
        memory.put(ChatMessage(role="user" if turn % 2 == 0 else "assistant", content=marker))
    history = memory.get()
    assert 6 <= len(history) <= 10 and all(message.content == marker for message in history)


def test_logprobs_name_the_tokens_that_were_taken(app: App) -> None:
    plain, llm = app.llm(), app.llm(logprobs=True, top_logprobs=2)
    for response in (llm.complete("Who built the tower?"), plain.complete("Who built the tower?", logprobs=True)):
        tokens = [alternatives[0].token for alternatives in response.logprobs]
        # A token may be a part of a character.
        assert "".join(tokens).replace("\ufffd", "") == response.text.replace("\ufffd", "")
        assert all(alternatives[0].logprob < 0 for alternatives in response.logprobs)
    chat = llm.chat([ChatMessage(role="user", content="Who built the tower?")])
    assert [each[0].token for each in chat.logprobs] == [each[0].token for each in response.logprobs]
    assert {len(each) for each in chat.logprobs} == {2}
    assert plain.complete("Who built the tower?").logprobs is None


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
        kept = CompressedContextPostprocessor(store=store).postprocess_nodes(nodes)
        replaced = CompressedContextPostprocessor(store=store, replace_text=True).postprocess_nodes(nodes)
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
    postprocessor = CompressedContextPostprocessor(store=store, ratio=8, on_missing="error")
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
    with pytest.raises(ConfigError, match="'show_progress'"):
        CompressSoftContext(store=store, show_progres=True)
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
