"""What goes wrong in an app of LangChain or LlamaIndex, and what it then hears."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chromadb
import pytest
import torch
from langchain_core.messages import HumanMessage
from llama_index.core.schema import NodeWithScore, TextNode

from ctx_compress_rag import DecoderMemoryError, MissingPassageError, SoftContextStore, StoreError
from ctx_compress_rag.store.scope import record_id
from helpers.langchain import QUESTION, SOURCES, TEXTS, App, open_app
from helpers.server import chroma_server
from langchain_ctx_compress import ChatCompressedContext, CompressedContextPostprocessor
from langchain_ctx_compress import restore_sources as restore_documents
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor as LlamaPostprocessor
from llama_index.postprocessor.ctx_compress import CompressSoftContext, restore_sources


def test_passage_deleted_before_the_answer(talkative: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, talkative)
    [marked] = app.postprocessor().invoke(SOURCES[:1])
    app.store.delete(["tower"])
    for ask in (app.llm().invoke, lambda text: list(app.llm().stream(text))):
        with pytest.raises(MissingPassageError, match="retrieve again"):
            ask(marked.page_content)
    with pytest.raises(MissingPassageError):
        restore_documents([marked], app.store)


def test_damaged_record_gives_way_to_text(talkative: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, talkative)
    [marked] = app.postprocessor().invoke(SOURCES[:1])
    raw, key = app.client.get_collection("docs-ctx"), record_id("tower", "default")
    record = raw.get(ids=[key])["metadatas"][0]
    raw.update(ids=[key], metadatas=[record | {"payload": record["payload"][:40]}])
    with pytest.raises(Exception, match="tower"):
        app.llm().invoke(marked.page_content)
    message = app.llm(on_unreadable="text").invoke(marked.page_content)
    assert message.content == app.llm().invoke(TEXTS["tower"]).content
    assert message.response_metadata["slots"] == 0


def test_a_store_that_cannot_be_reached(talkative: Any, tmp_path: Path) -> None:
    with chroma_server(tmp_path) as port:
        store = SoftContextStore(chromadb.HttpClient("127.0.0.1", port), talkative, key=b"k" * 32)
        postprocessor, llm = CompressedContextPostprocessor(store=store), ChatCompressedContext(store=store)
        of_nodes, llama = LlamaPostprocessor(store, replace_text=True), CompressedContextLLM(store=store, max_tokens=4)
        [marked] = postprocessor.invoke(SOURCES[:1])
        assert llm.invoke(marked.page_content).response_metadata["slots"] > 0
        nodes = [NodeWithScore(node=TextNode(text=TEXTS["tower"]))]
        replaced = of_nodes.postprocess_nodes(nodes)
        assert restore_sources(replaced, store) == nodes
    calls = [
        lambda: postprocessor.invoke(SOURCES[:1]),
        lambda: restore_documents([marked], store),
        lambda: llm.invoke(marked.page_content),
        lambda: list(llm.stream(marked.page_content)),
        lambda: asyncio.run(llm.ainvoke(marked.page_content)),
        lambda: of_nodes.postprocess_nodes(nodes),
        lambda: asyncio.run(of_nodes.apostprocess_nodes(nodes)),
        lambda: restore_sources(replaced, store),
        lambda: CompressSoftContext(store=store)([TextNode(text="A new text.")]),
        lambda: llama.complete(marked.page_content),
        lambda: list(llama.stream_complete(marked.page_content)),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"Chroma server .*does not answer .*: check that it runs"):
            call()
    assert llm.invoke(QUESTION).content and llama.complete(QUESTION).text  # what needs no store is answered


def test_another_bundle_than_the_stores(make_tiny_bundle: Any, talkative: Any, tmp_path: Path) -> None:
    client = chromadb.PersistentClient(str(tmp_path))
    old = open_app(tmp_path, talkative)
    [marked] = old.postprocessor().invoke(SOURCES[:1])
    new = SoftContextStore(client, make_tiny_bundle(seed=9), collection="new")
    new.add(SOURCES, progress=False)
    llm = ChatCompressedContext(store=new)
    # An old prompt, from a saved history: the passage is there, and the vectors meant are not.
    for ask in (llm.invoke, lambda text: list(llm.stream(text))):
        with pytest.raises(MissingPassageError, match="retrieve again"):
            ask(marked.page_content)
    [again] = CompressedContextPostprocessor(store=new).invoke(SOURCES[:1])
    assert llm.invoke(again.page_content).response_metadata["slots"] > 0


def test_out_of_memory_is_said_and_passes(talkative: Any, app: App) -> None:
    marker, llm = app.store.marker("tower", 8), app.llm()
    prompt = f"{marker} {QUESTION}"
    expected = llm.invoke(prompt).content

    def more_than_there_is(*_: Any) -> None:
        torch.empty(1 << 50)  # the allocator's own refusal

    with talkative.backbone.model.model.layers[1].register_forward_pre_hook(more_than_there_is):
        calls = [
            lambda: llm.invoke(prompt),
            lambda: list(llm.stream(prompt)),
            lambda: asyncio.run(llm.ainvoke(prompt)),
            lambda: llm.batch([prompt]),
        ]
        for call in calls:
            with pytest.raises(DecoderMemoryError, match="use a coarser ratio") as caught:
                call()
            assert "allocate" in str(caught.value) and "1 prompts" in str(caught.value)
            assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert llm.invoke(prompt).content == expected


def test_other_errors_of_the_decoder_are_left_as_they_are(talkative: Any, app: App) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a shape does not fit")

    model = talkative.backbone.model
    with model.register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="a shape does not fit"):
        app.llm().invoke(QUESTION)


@pytest.mark.parametrize(
    "way", ["ainvoke", "astream, canceled", "astream", "stream", "acomplete", "astream_complete", "stream_complete"]
)
async def test_whoever_stops_listening_gives_the_decoder_back(app: App, way: str) -> None:
    """A canceled task or a stream left early ends the generation within a few tokens, not at its end."""
    steps: list[int] = []
    llm, llama = app.llm(max_tokens=400), CompressedContextLLM(store=app.store, max_tokens=400)

    async def read(question: str) -> None:
        async for _ in llm.astream(question):
            pass

    with app.bundle.backbone.model.register_forward_pre_hook(lambda *_: steps.append(1)):
        if way in ("stream", "stream_complete"):
            blocking: Any = llm.stream(QUESTION) if way == "stream" else llama.stream_complete(QUESTION)
            await asyncio.to_thread(next, blocking)
            await asyncio.to_thread(blocking.close)
        elif way in ("astream", "astream_complete"):
            stream: Any = llm.astream(QUESTION) if way == "astream" else await llama.astream_complete(QUESTION)
            await anext(stream)
            await stream.aclose()
        else:
            ask = {"ainvoke": llm.ainvoke, "astream, canceled": read, "acomplete": llama.acomplete}[way]
            task = asyncio.ensure_future(ask(QUESTION))
            while not steps:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await app.llm(max_tokens=1).ainvoke(QUESTION)  # waits for the decoder
    assert 0 < len(steps) < 200
    whole = llama.acomplete(QUESTION) if "complete" in way else llm.ainvoke(QUESTION)
    assert len(app.bundle.tokenizer((await whole).text)["input_ids"]) > 200


def test_threads_on_one_model_answer_as_one_after_another(app: App) -> None:
    """Prompts with and without slots, called and streamed, with their own scopes and settings."""
    settings = [{}, {"max_tokens": 5}, {"scope": "anna"}, {"temperature": 1.0, "seed": 3}]
    llms = [app.llm(on_unreadable="text", **each) for each in settings]
    prompts = [
        [HumanMessage(f"{app.store.marker(name, 8, scope)} {number}?")]
        for number, (name, scope) in enumerate(
            (name, scope) for name in ("tower", "mill") for scope in ("default", "anna")
        )
    ] + [[HumanMessage(QUESTION)]]
    work = [(llm, prompt, way) for llm in llms for prompt in prompts for way in ("invoke", "stream")]

    def answer(each: tuple[ChatCompressedContext, Any, str]) -> tuple[str, int]:
        llm, prompt, way = each
        if way == "invoke":
            message = llm.invoke(prompt)
            return message.text, message.response_metadata["slots"]
        chunks = list(llm.stream(prompt))
        return "".join(chunk.text for chunk in chunks), chunks[-1].response_metadata["slots"]

    alone = [answer(each) for each in work]
    assert len({text for text, _ in alone}) > len(prompts)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, work)) == alone
