"""The LlamaIndex classes on a real index in Chroma on disk, real engines and a real (tiny) decoder."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import chromadb
import pytest
import torch
from llama_index.core import Settings, VectorStoreIndex, get_response_synthesizer
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers.base import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.schema import Document, ImageNode, MetadataMode, NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.vector_stores.chroma import ChromaVectorStore

from ctx_compress_rag.decoders.transformers import Sampling, TransformersDecoder
from ctx_compress_rag.errors import ConfigError, MissingPassageError, RatioError
from ctx_compress_rag.extras import MissingExtraError
from ctx_compress_rag.markers import Marker, scope
from ctx_compress_rag.stores import SoftContextStore
from llama_index.llms.ctx_compress import CompressedContextLLM, marker_tokenizer
from llama_index.postprocessor.ctx_compress import (
    CompressedContextPostprocessor,
    CompressedTextNode,
    expand_prompt,
    restore_sources,
)

PASSAGES = [
    "The harbour of Velmora was built by Oda Brink in 1612, and its lighthouse still burns whale oil.",
    "Tarin Holt keeps bees on the roof of the town hall; the honey is sold under the name of Old Gold.",
    "The river Issel freezes every January, and the people of Velmora then hold a market on the ice.",
    "In 1874 the painter Lena Marr gave forty pictures to the library, which hung them in the cellar.",
]
QUESTION = "Who built the harbour of Velmora?"
MODES = ["compact", "refine", "tree_summarize", "accumulate", "compact_accumulate", "simple_summarize"]
RATIO = 8
TOP_K = 3
MAX_TOKENS = 8


class HashedWords(BaseEmbedding):
    """Bags of hashed words: retrieval that is deterministic and needs no model."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = torch.zeros(128)
        for word in text.lower().split():
            if len(word) > 3:
                vector[crc32(word.strip(".,;?").encode()) % 128] += 1.0
        return torch.nn.functional.normalize(vector, dim=0).tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class Calls(BaseEventHandler):
    """What LlamaIndex itself reports of each call of the LLM: its messages and its last response."""

    started: list[LLMChatStartEvent] = Field(default_factory=list)
    ended: list[LLMChatEndEvent] = Field(default_factory=list)

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, LLMChatStartEvent):
            self.started.append(event)
        if isinstance(event, LLMChatEndEvent):
            self.ended.append(event)


@pytest.fixture(scope="module")
def bundle(make_tiny_bundle: Callable[..., Any]) -> Any:
    """Random weights large enough that every input shows in the answer."""
    bundle = make_tiny_bundle(seed=3)
    with torch.no_grad():
        for name, parameter in bundle.backbone.model.named_parameters():
            if parameter.ndim == 2 and "lora_" not in name:
                parameter.mul_(10)
    bundle.reader.initialise(1.0)
    return bundle


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> chromadb.Collection:
    """The app's own."""
    return chromadb.PersistentClient(path=str(tmp_path_factory.mktemp("chroma"))).create_collection("app")


@pytest.fixture(scope="module")
def index(collection: chromadb.Collection) -> VectorStoreIndex:
    nodes = [TextNode(id_=f"n{i}", text=text, metadata={"page": f"p{i}"}) for i, text in enumerate(PASSAGES)]
    nodes[0].excluded_llm_metadata_keys = ["page"]
    stored = VectorStoreIndex.from_vector_store(
        ChromaVectorStore(chroma_collection=collection), embed_model=HashedWords()
    )
    stored.insert_nodes(nodes)
    return stored


@pytest.fixture(scope="module")
def shared(collection: chromadb.Collection, bundle: Any) -> SoftContextStore:
    """One store beside the index's own collection; tests that use it leave what is in it."""
    store = SoftContextStore(collection, bundle, key=b"k" * 32)
    store.add(PASSAGES, [f"n{i}" for i in range(len(PASSAGES))], progress=False)
    return store


@pytest.fixture
def empty(tmp_path: Path, bundle: Any) -> Iterator[SoftContextStore]:
    with SoftContextStore(tmp_path / "chroma", bundle) as store:
        yield store


@pytest.fixture
def llm(shared: SoftContextStore) -> CompressedContextLLM:
    return CompressedContextLLM(store=shared, max_tokens=MAX_TOKENS)


@pytest.fixture(autouse=True)
def settings(shared: SoftContextStore) -> Iterator[None]:
    Settings.tokenizer = marker_tokenizer(shared)
    yield
    Settings._tokenizer = None


@pytest.fixture
def calls() -> Iterator[Calls]:
    handler, dispatcher = Calls(), get_dispatcher()
    before = list(dispatcher.event_handlers)
    dispatcher.add_event_handler(handler)
    yield handler
    dispatcher.event_handlers = before


@pytest.fixture
def nodes(index: VectorStoreIndex) -> list[NodeWithScore]:
    return index.as_retriever(similarity_top_k=TOP_K).retrieve(QUESTION)


def tokens(bundle: Any, text: str) -> int:
    return len(bundle.tokenizer(text, add_special_tokens=False)["input_ids"])


def slots_of(store: SoftContextStore, text: str) -> list[int]:
    return [part.slots for part in store.split(text) if isinstance(part, Marker)]


def check_calls(calls: Calls, store: SoftContextStore) -> list[str]:
    """Every answer is the decoder's own for the messages, read with all slots; the answers."""
    decoder = TransformersDecoder(store.bundle, store)
    assert calls.started and len(calls.started) == len(calls.ended)
    read = 0
    for event in calls.ended:
        chat = [{"role": m.role.value, "content": m.content or ""} for m in event.messages]
        [direct] = decoder.generate([chat], Sampling(max_new_tokens=MAX_TOKENS))
        assert event.response is not None
        assert event.response.message.content == direct.text
        assert event.response.raw["usage"]["prompt_tokens"] == direct.prompt_tokens
        in_prompt = sum(slots_of(store, "\n".join(message["content"] for message in chat)))
        assert event.response.raw["slots"] == direct.slots == in_prompt
        for passage in PASSAGES:
            assert passage not in str(chat)
        read += in_prompt
    assert read > 0
    return [event.response.message.content or "" for event in calls.ended if event.response]


def check_sources(source_nodes: list[NodeWithScore], retrieved: list[NodeWithScore]) -> None:
    assert [n.node_id for n in source_nodes] == [n.node_id for n in retrieved]
    assert [n.score for n in source_nodes] == [n.score for n in retrieved]
    assert [n.get_content() for n in source_nodes] == [n.get_content() for n in retrieved]
    assert [n.metadata for n in source_nodes] == [n.metadata for n in retrieved]


# Nodes


def test_only_the_llm_sees_the_marker(shared: SoftContextStore, nodes: list[NodeWithScore], bundle: Any) -> None:
    before = [node.model_dump() for node in nodes]
    new = CompressedContextPostprocessor(shared, ratio=RATIO).postprocess_nodes(nodes, query_str=QUESTION)
    assert [node.model_dump() for node in nodes] == before
    check_sources(new, nodes)
    for old, node in zip(nodes, new, strict=True):
        for mode in (MetadataMode.ALL, MetadataMode.EMBED, MetadataMode.NONE):
            assert node.node.get_content(mode) == old.node.get_content(mode)
            assert node.node.get_content_blocks(mode) == old.node.get_content_blocks(mode)
        assert (node.text, node.node.hash, str(node)) == (old.text, old.node.hash, str(old))
        assert node.node.relationships == old.node.relationships
        shown = node.node.get_content(MetadataMode.LLM)
        metadata = "" if node.node_id == "n0" else f"page: p{node.node_id[1:]}\n\n"
        marker = shared.marker(node.node_id, RATIO)
        assert shown == metadata + marker
        assert [block.text for block in node.node.get_content_blocks(MetadataMode.LLM)][-1] == marker
        assert slots_of(shared, shown) == [-(-tokens(bundle, old.text) // RATIO)]


async def test_async_gives_the_same(shared: SoftContextStore, nodes: list[NodeWithScore]) -> None:
    postprocessor = CompressedContextPostprocessor(shared, ratio=RATIO)
    assert await postprocessor.apostprocess_nodes(nodes) == postprocessor.postprocess_nodes(nodes)


def shown_slots(store: SoftContextStore, nodes: list[NodeWithScore]) -> list[int]:
    return slots_of(store, " ".join(node.node.get_content(MetadataMode.LLM) for node in nodes))


@pytest.mark.parametrize("budget", [3, 10, 17, 30, 10_000])
def test_a_budget_takes_the_finest_ratio_that_fits(
    shared: SoftContextStore, nodes: list[NodeWithScore], bundle: Any, budget: int
) -> None:
    found = shown_slots(shared, CompressedContextPostprocessor(shared, token_budget=budget).postprocess_nodes(nodes))
    # Mean pooling stores ceil(tokens / 4) slots; any number of neighbours can be merged.
    stored = [-(-tokens(bundle, node.text) // 4) for node in nodes]
    options = ([-(-n // factor) for n in stored] for factor in range(1, 1000))
    assert found == next(option for option in options if sum(option) <= budget)


def test_what_is_missing(empty: SoftContextStore, nodes: list[NodeWithScore]) -> None:
    with pytest.raises(MissingPassageError, match=nodes[0].node_id):
        CompressedContextPostprocessor(empty, on_missing="error").postprocess_nodes(nodes)
    assert CompressedContextPostprocessor(empty, on_missing="text").postprocess_nodes(nodes) == nodes
    assert len(empty) == 0
    first = CompressedContextPostprocessor(empty).postprocess_nodes(nodes[:1])
    assert (empty.ids(), len(shown_slots(empty, first))) == ([nodes[0].node_id], 1)
    mixed = CompressedContextPostprocessor(empty, on_missing="text").postprocess_nodes(nodes)
    assert [isinstance(node.node, CompressedTextNode) for node in mixed] == [True, False, False]
    changed = [NodeWithScore(node=TextNode(id_=nodes[0].node_id, text="Another text under this id."), score=0.1)]
    with pytest.raises(MissingPassageError, match="with this text"):
        CompressedContextPostprocessor(empty, on_missing="error").postprocess_nodes(changed)


@pytest.mark.parametrize("replace_text", [False, True])
def test_marking_twice_is_marking_once(
    shared: SoftContextStore, nodes: list[NodeWithScore], replace_text: bool
) -> None:
    once = CompressedContextPostprocessor(shared, ratio=4, replace_text=replace_text).postprocess_nodes(nodes)
    twice = CompressedContextPostprocessor(shared, ratio=16, replace_text=replace_text).postprocess_nodes(once)
    direct = CompressedContextPostprocessor(shared, ratio=16, replace_text=replace_text).postprocess_nodes(nodes)
    assert twice == direct
    passages = shared.get_passages([node.node_id for node in nodes])
    assert [passage and passage.text for passage in passages] == [node.text for node in nodes]


def test_sources_are_restored(shared: SoftContextStore, nodes: list[NodeWithScore]) -> None:
    for replace_text in (False, True):
        postprocessor = CompressedContextPostprocessor(shared, ratio=RATIO, replace_text=replace_text, scope="t")
        new = postprocessor.postprocess_nodes(nodes)
        restored = restore_sources(new, shared, scope="t")
        assert restored == nodes
        assert restore_sources(restored, shared, scope="t") == nodes
    assert restore_sources(new) == new  # replaced text without a store
    assert restore_sources(new, shared, scope="other") == new


def test_prompts_are_expanded(shared: SoftContextStore) -> None:
    prompt = f"A {shared.marker('n1', 4)} B{shared.marker('n2', 16)}{shared.marker('n1', 8, scope='other')}"
    other = shared.marker("n1", 8, scope="other")
    assert expand_prompt(prompt, shared) == f"A {PASSAGES[1]} B{PASSAGES[2]}{other}"
    assert expand_prompt("no marker", shared) == "no marker"


def test_what_is_not_text_passes_through(shared: SoftContextStore) -> None:
    image = NodeWithScore(node=ImageNode(text="a caption", image_url="http://localhost/x.png"), score=0.3)
    blank = NodeWithScore(node=TextNode(text="  "), score=0.2)
    new = CompressedContextPostprocessor(shared, ratio=RATIO).postprocess_nodes([image, blank])
    assert new == [image, blank]
    assert CompressedContextPostprocessor(shared).postprocess_nodes([]) == []


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


def test_a_text_changed_afterwards_is_sent_as_text(shared: SoftContextStore, nodes: list[NodeWithScore]) -> None:
    new = CompressedContextPostprocessor(shared, ratio=RATIO).postprocess_nodes(nodes)
    later = MetadataReplacementPostProcessor(target_metadata_key="page").postprocess_nodes(new)
    for node in later:
        page = f"p{node.node_id[1:]}"
        assert node.node.get_content(MetadataMode.LLM) == (page if page == "p0" else f"page: {page}\n\n{page}")


def test_a_saved_node_is_the_plain_one(shared: SoftContextStore, nodes: list[NodeWithScore]) -> None:
    new = CompressedContextPostprocessor(shared, ratio=RATIO).postprocess_nodes(nodes)
    docstore = SimpleDocumentStore()
    docstore.add_documents([node.node for node in new])
    again = SimpleDocumentStore.from_dict(docstore.to_dict())
    for old in nodes:
        loaded = again.get_node(old.node_id)
        assert type(loaded) is TextNode
        assert (loaded.text, loaded.metadata, loaded.relationships) == (
            old.text, old.metadata, old.node.relationships,
        )  # fmt: skip
        assert loaded.get_content(MetadataMode.LLM) == old.node.get_content(MetadataMode.LLM)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ratio": 6}, RatioError, "ratio=6"),
        ({"ratio": 4, "token_budget": 9}, ConfigError, "token_budget=9"),
        ({"token_budget": 0}, ConfigError, "token_budget=0"),
        ({"on_missing": "ignore"}, ConfigError, "on_missing='ignore'"),
        ({"ration": 8}, TypeError, "ration"),
    ],
)
def test_impossible_arguments(
    shared: SoftContextStore, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CompressedContextPostprocessor(shared, **arguments)


def test_more_passages_than_slots(shared: SoftContextStore, nodes: list[NodeWithScore]) -> None:
    with pytest.raises(RatioError, match="do not fit into 2 slots"):
        CompressedContextPostprocessor(shared, token_budget=2).postprocess_nodes(nodes)


def test_no_key_or_vector_in_what_is_shown(shared: SoftContextStore, llm: CompressedContextLLM) -> None:
    postprocessor = CompressedContextPostprocessor(shared, ratio=RATIO)
    shown = postprocessor.to_json() + repr(postprocessor) + llm.to_json() + repr(llm) + str(llm.to_payload())
    assert "kkkk" not in shown and "SoftContextStore" not in shown
    again = CompressedContextPostprocessor.from_dict(postprocessor.to_dict(), store=shared)
    assert again.ratio == RATIO
    assert CompressedContextLLM.from_dict(llm.to_dict(), store=shared).max_tokens == llm.max_tokens


# Query engines


def engine(index: VectorStoreIndex, llm: CompressedContextLLM, mode: str = "compact", **arguments: Any) -> Any:
    postprocessor = CompressedContextPostprocessor(llm.store, ratio=RATIO)
    return index.as_query_engine(
        llm=llm, similarity_top_k=TOP_K, response_mode=mode, node_postprocessors=[postprocessor], **arguments
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_response_mode(
    index: VectorStoreIndex, llm: CompressedContextLLM, calls: Calls, nodes: list[NodeWithScore], mode: str
) -> None:
    response = engine(index, llm, mode).query(QUESTION)
    answers = check_calls(calls, llm.store)
    per_node = {"refine": TOP_K, "accumulate": TOP_K}
    assert len(answers) == per_node.get(mode, 1)
    assert answers[-1].strip() in str(response)
    check_sources(response.source_nodes, nodes)
    assert restore_sources(response) == nodes


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "accumulate"])
async def test_async_query(
    index: VectorStoreIndex, llm: CompressedContextLLM, calls: Calls, nodes: list[NodeWithScore], mode: str
) -> None:
    query_engine = engine(index, llm, mode, use_async=True)
    response = await query_engine.aquery(QUESTION)
    check_calls(calls, llm.store)
    check_sources(response.source_nodes, nodes)
    assert str(response) == str(await asyncio.to_thread(engine(index, llm, mode).query, QUESTION))


def test_streamed_query(index: VectorStoreIndex, llm: CompressedContextLLM, calls: Calls) -> None:
    response = engine(index, llm, streaming=True).query(QUESTION)
    pieces = list(response.response_gen)
    [answer] = check_calls(calls, llm.store)
    assert "".join(pieces) == answer
    assert len(pieces) > 2
    assert restore_sources(response)[0].text == PASSAGES[0]


async def test_streamed_async_query(index: VectorStoreIndex, llm: CompressedContextLLM, calls: Calls) -> None:
    response = await engine(index, llm, streaming=True).aquery(QUESTION)
    pieces = [piece async for piece in response.async_response_gen()]
    [answer] = check_calls(calls, llm.store)
    assert "".join(pieces) == answer


def test_retriever_query_engine_within_a_budget(
    index: VectorStoreIndex, llm: CompressedContextLLM, calls: Calls
) -> None:
    postprocessor = CompressedContextPostprocessor(llm.store, token_budget=9)
    query_engine = RetrieverQueryEngine.from_args(
        index.as_retriever(similarity_top_k=TOP_K), llm=llm, node_postprocessors=[postprocessor]
    )
    query_engine.query(QUESTION)
    check_calls(calls, llm.store)
    assert 3 <= calls.ended[0].response.raw["slots"] <= 9


def test_the_answer_depends_on_the_slots(
    index: VectorStoreIndex, llm: CompressedContextLLM, nodes: list[NodeWithScore]
) -> None:
    """The same prompt with other vectors in the same places, or none, has another answer."""
    postprocessor = CompressedContextPostprocessor(llm.store, ratio=RATIO)
    prompt = postprocessor.postprocess_nodes(nodes)[0].node.get_content(MetadataMode.LLM) + "\n" + QUESTION
    answer = llm.complete(prompt)
    changed = prompt.replace(llm.store.marker("n0", RATIO), llm.store.marker("n1", RATIO))
    assert changed != prompt
    assert llm.complete(changed).text != answer.text
    assert llm.complete(expand_prompt(prompt, llm.store)).text != answer.text
    assert llm.complete(prompt).text == answer.text


def test_citations(index: VectorStoreIndex, llm: CompressedContextLLM, calls: Calls) -> None:
    """Replaced text, or the LLM's metadata mode: either way the engine's headings stand before markers."""
    for postprocessor, mode in (
        (CompressedContextPostprocessor(llm.store, ratio=RATIO, replace_text=True), MetadataMode.NONE),
        (CompressedContextPostprocessor(llm.store, ratio=RATIO), MetadataMode.LLM),
    ):
        calls.started.clear()
        calls.ended.clear()
        cited = CitationQueryEngine.from_args(
            index,
            llm=llm,
            similarity_top_k=2,
            node_postprocessors=[postprocessor],
            metadata_mode=mode,
            citation_qa_template=PromptTemplate("{context_str}\nQuery: {query_str}\nAnswer, with sources: "),
            citation_refine_template=PromptTemplate("{existing_answer}\n{context_msg}\nQuery: {query_str}\nAnswer: "),
        )
        response = cited.query(QUESTION)
        check_calls(calls, llm.store)
        prompt = calls.started[0].messages[-1].content or ""
        assert prompt.index("Source 1:\n") < prompt.index("[[ctx:") < prompt.index("Source 2:\n")
        assert len(slots_of(llm.store, prompt)) == 2
        restored = restore_sources(response, llm.store)
        assert restored[0].text.startswith("Source 1:\n") and PASSAGES[0] in restored[0].text


# Chat engines


@pytest.mark.parametrize("mode", ["context", "condense_plus_context"])
async def test_chat_engines(
    index: VectorStoreIndex, llm: CompressedContextLLM, calls: Calls, nodes: list[NodeWithScore], mode: str
) -> None:
    def chat_engine() -> Any:
        calls.started.clear()
        calls.ended.clear()
        postprocessor = CompressedContextPostprocessor(llm.store, ratio=RATIO)
        return index.as_chat_engine(
            chat_mode=mode, llm=llm, similarity_top_k=TOP_K, node_postprocessors=[postprocessor]
        )

    response = await asyncio.to_thread(chat_engine().chat, QUESTION)
    [answer] = check_calls(calls, llm.store)
    assert str(response) == answer
    check_sources(response.source_nodes, nodes)
    assert restore_sources(response) == nodes

    assert str(await chat_engine().achat(QUESTION)) == answer
    check_calls(calls, llm.store)

    streamed = await asyncio.to_thread(chat_engine().stream_chat, QUESTION)
    assert await asyncio.to_thread(lambda: "".join(streamed.response_gen)) == answer
    check_calls(calls, llm.store)

    streamed = await chat_engine().astream_chat(QUESTION)
    assert "".join([piece async for piece in streamed.async_response_gen()]) == answer
    check_calls(calls, llm.store)


def test_a_second_turn_keeps_the_conversation(index: VectorStoreIndex, llm: CompressedContextLLM, calls: Calls) -> None:
    postprocessor = CompressedContextPostprocessor(llm.store, ratio=RATIO)
    chat = index.as_chat_engine(chat_mode="context", llm=llm, similarity_top_k=2, node_postprocessors=[postprocessor])
    first = chat.chat(QUESTION)
    chat.chat("And when?")
    check_calls(calls, llm.store)
    assert any(str(first) == m.content for m in calls.ended[-1].messages)


# The LLM


@pytest.fixture
def prompt(shared: SoftContextStore) -> str:
    return f"Context: {shared.marker('n0', 4)} and {shared.marker('n3', RATIO)}\nQuestion: {QUESTION}"


async def test_every_way_to_ask_gives_one_answer(llm: CompressedContextLLM, prompt: str) -> None:
    message = [ChatMessage(role="user", content=prompt)]
    decoder, sampling = TransformersDecoder(llm.store.bundle, llm.store), Sampling(max_new_tokens=MAX_TOKENS)
    [direct] = decoder.generate([[{"role": "user", "content": prompt}]], sampling)
    assert direct.slots == sum(slots_of(llm.store, prompt)) > 0
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
    assert (await llm.acomplete(prompt)).text == direct.text
    assert (await llm.achat(message)).message.content == direct.text
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


def test_a_formatted_prompt_is_used_as_it_is(llm: CompressedContextLLM, prompt: str) -> None:
    [direct] = TransformersDecoder(llm.store.bundle, llm.store).generate([prompt], Sampling(max_new_tokens=MAX_TOKENS))
    raw = llm.complete(prompt, formatted=True)
    assert (raw.text, raw.raw["usage"]["prompt_tokens"]) == (direct.text, direct.prompt_tokens)
    assert direct.prompt_tokens < llm.complete(prompt).raw["usage"]["prompt_tokens"]


def test_sampling_settings(llm: CompressedContextLLM, prompt: str) -> None:
    plain = llm.complete(prompt).text
    assert llm.complete(prompt, max_tokens=3).raw["usage"]["completion_tokens"] == 3
    cut = plain[len(plain) // 2 :][:3]
    assert llm.complete(prompt, stop=cut).text == plain[: plain.index(cut)]
    assert llm.complete(prompt, stop=["never there", cut]).raw["finish_reason"] == "stop"
    sampled = [llm.complete(prompt, temperature=1.5, seed=seed).text for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    own = CompressedContextLLM(store=llm.store, max_tokens=MAX_TOKENS, temperature=1.5, seed=1)
    assert own.complete(prompt).text == sampled[0]
    assert own.complete(prompt, temperature=0).text == plain
    assert llm.complete(prompt, temperature=None).text == plain


def test_what_the_llm_refuses(llm: CompressedContextLLM) -> None:
    with pytest.raises(ConfigError, match="'max_length'"):
        llm.complete("a question", max_length=3)
    with pytest.raises(ConfigError, match="image block"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")])])
    with pytest.raises(ValueError, match="temperature=-1"):
        CompressedContextLLM(store=llm.store, temperature=-1)
    with pytest.raises(ValueError, match="max_length"):
        CompressedContextLLM(store=llm.store, max_length=3)


def test_metadata(llm: CompressedContextLLM) -> None:
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (1024, MAX_TOKENS, "tiny")
    assert metadata.is_chat_model and not metadata.is_function_calling_model


def test_without_a_chat_template(llm: CompressedContextLLM, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.store.bundle.tokenizer, "chat_template", None)
    decoder = TransformersDecoder(llm.store.bundle, llm.store)
    asked, chatted = decoder.generate([prompt, f"user: {prompt}\nassistant: "], Sampling(max_new_tokens=MAX_TOKENS))
    assert not llm.metadata.is_chat_model
    assert llm.complete(prompt).text == asked.text
    assert llm.predict(PromptTemplate("{it}"), it=prompt) == asked.text
    assert llm.chat([ChatMessage(role="user", content=prompt)]).message.content == chatted.text


async def test_the_event_loop_goes_on(llm: CompressedContextLLM, bundle: Any, prompt: str) -> None:
    """With the decoder busy elsewhere, whoever awaits an answer leaves the loop to others."""

    async def stream() -> str:
        return "".join([response.delta or "" async for response in await llm.astream_complete(prompt)])

    with bundle.backbone.lock:
        tasks = [asyncio.create_task(llm.acomplete(prompt)), asyncio.create_task(stream())]
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)
    completed, streamed = await asyncio.gather(*tasks)
    assert streamed == completed.text != ""


async def test_a_stream_may_be_left_early(llm: CompressedContextLLM, prompt: str) -> None:
    full = llm.complete(prompt, max_tokens=40).text
    stream = await llm.astream_complete(prompt, max_tokens=40)
    first = await anext(stream)
    await stream.aclose()
    assert full.startswith(first.text) and first.text != full
    assert (await llm.acomplete(prompt, max_tokens=40)).text == full


def test_another_tenants_marker_is_only_text(llm: CompressedContextLLM, nodes: list[NodeWithScore]) -> None:
    with scope("tenant a"):
        new = CompressedContextPostprocessor(llm.store, ratio=RATIO).postprocess_nodes(nodes)
        text = new[0].node.get_content(MetadataMode.LLM)
        assert llm.complete(text).raw["slots"] > 0
    with scope("tenant b"):
        assert llm.complete(text).raw["slots"] == 0
    assert llm.complete(text).raw["slots"] == 0


def test_a_deleted_passage_is_an_error(empty: SoftContextStore, nodes: list[NodeWithScore]) -> None:
    new = CompressedContextPostprocessor(empty, ratio=RATIO).postprocess_nodes(nodes)
    empty.delete([nodes[0].node_id])
    with pytest.raises(MissingPassageError, match="deleted"):
        CompressedContextLLM(store=empty).complete(new[0].node.get_content(MetadataMode.LLM))


# Counting


def test_a_marker_counts_as_its_slots(shared: SoftContextStore, bundle: Any) -> None:
    count = marker_tokenizer(shared)
    for ratio in (4, 16):
        marker = shared.marker("n2", ratio)
        assert len(count(marker)) == -(-tokens(bundle, PASSAGES[2]) // ratio)
    assert count(PASSAGES[0]) == bundle.tokenizer(PASSAGES[0], add_special_tokens=False)["input_ids"]
    forged = "[[ctx:" + "a" * 20 + ".1." + "a" * 16 + "]]"
    assert len(count(forged)) == tokens(bundle, forged)


def test_prompts_are_packed_by_slots(llm: CompressedContextLLM, bundle: Any) -> None:
    """What fits as slots stays in one chunk, and no marker is cut where the chunks end."""
    markers = [llm.store.marker(f"n{i % len(PASSAGES)}", RATIO) for i in range(30)]
    template = PromptTemplate("{context_str}")
    helper = PromptHelper.from_llm_metadata(llm.metadata)
    slots = sum(map(sum, (slots_of(llm.store, marker) for marker in markers)))
    assert slots < 1024 - MAX_TOKENS < sum(tokens(bundle, marker) for marker in markers)
    assert helper.repack(template, markers) == ["\n\n".join(markers)]
    packed = PromptHelper(context_window=60, num_output=12, chunk_overlap_ratio=0.0).repack(template, markers)
    assert len(packed) > 1
    assert [m for chunk in packed for m in chunk.split()] == markers
    assert all(len(marker_tokenizer(llm.store)(chunk)) <= 48 for chunk in packed)


def test_llama_index_counts_the_slots(index: VectorStoreIndex, shared: SoftContextStore, calls: Calls) -> None:
    counter = TokenCountingHandler()
    llm = CompressedContextLLM(store=shared, max_tokens=MAX_TOKENS)
    synthesizer = get_response_synthesizer(llm=llm, callback_manager=CallbackManager([counter]))
    postprocessor = CompressedContextPostprocessor(shared, ratio=RATIO)
    nodes = postprocessor.postprocess_nodes(index.as_retriever(similarity_top_k=TOP_K).retrieve(QUESTION))
    synthesizer.synthesize(QUESTION, nodes)
    usage = calls.ended[0].response.raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"]


# Installation


@pytest.mark.parametrize("package", ["llama_index.postprocessor.ctx_compress", "llama_index.llms.ctx_compress"])
def test_without_llama_index_the_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(package):
            monkeypatch.delitem(sys.modules, name)
        elif name.startswith("llama_index.core"):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ctx-compress-rag\[llama-index\]'"):
        importlib.import_module(package)
