"""What goes wrong in a LlamaIndex app, and what it then hears."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chromadb
import pytest
import torch
from llama_index.core.schema import MetadataMode, TextNode

from ctx_compress_rag.errors import DecoderMemoryError, FingerprintMismatchError, MissingPassageError, StoreError
from ctx_compress_rag.stores import SoftContextStore
from helpers.llama_index import MAX_TOKENS, PASSAGES, QUESTION, RATIO, App, index_in
from helpers.server import chroma_server
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import (
    CompressedContextPostprocessor,
    CompressSoftContext,
    restore_sources,
)


def engine_on(store: SoftContextStore, index: Any, **arguments: Any) -> Any:
    return index.as_query_engine(
        llm=CompressedContextLLM(store=store, max_tokens=MAX_TOKENS),
        similarity_top_k=2,
        node_postprocessors=[CompressedContextPostprocessor(store, ratio=RATIO)],
        **arguments,
    )


def test_a_store_that_cannot_be_reached(app: App, tmp_path: Path) -> None:
    """Retrieval works, the soft contexts' server is gone: one error, which says so, wherever it is met."""
    with chroma_server(tmp_path) as port:
        store = SoftContextStore(chromadb.HttpClient("127.0.0.1", port), app.bundle, key=b"k" * 32)
        engine = engine_on(store, app.index)
        assert restore_sources(engine.query(QUESTION)) == app.nodes()[:2]
        replaced = CompressedContextPostprocessor(store, replace_text=True).postprocess_nodes(app.nodes())
        marked = replaced[0].text
    llm = CompressedContextLLM(store=store, max_tokens=MAX_TOKENS)
    calls: list[Callable[[], Any]] = [
        lambda: engine.query(QUESTION),
        lambda: asyncio.run(engine.aquery(QUESTION)),
        lambda: llm.complete(marked),
        lambda: list(llm.stream_complete(marked)),
        lambda: restore_sources(replaced, store),
        lambda: CompressSoftContext(store=store)([TextNode(text="A new text.")]),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="a Chroma server does not answer .*: see that it runs"):
            call()
    assert llm.complete(QUESTION).text  # what needs no store is answered


class _Deleting(CompressedContextPostprocessor):
    """Someone deletes the passages just after retrieval."""

    def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
        marked = super()._postprocess_nodes(nodes, query_bundle)
        self.store.delete([nodes[0].node_id])
        return marked


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate"])
def test_a_passage_deleted_between_retrieval_and_answer(app: App, tmp_path: Path, mode: str) -> None:
    with SoftContextStore(tmp_path, app.bundle) as store:
        llm = CompressedContextLLM(store=store, max_tokens=MAX_TOKENS)
        engine = app.index.as_query_engine(llm=llm, response_mode=mode, node_postprocessors=[_Deleting(store)])
        with pytest.raises(MissingPassageError, match="deleted .*retrieve again"):
            engine.query(QUESTION)
        # The next question finds it missing at retrieval, and compresses it again.
        assert str(engine_on(store, app.index).query(QUESTION))


def test_a_deleted_replaced_text_cannot_be_restored(app: App, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, app.bundle) as store:
        kept = CompressedContextPostprocessor(store).postprocess_nodes(app.nodes())
        replaced = CompressedContextPostprocessor(store, replace_text=True).postprocess_nodes(app.nodes())
        store.delete(["n0"])
        assert restore_sources(kept, store) == app.nodes()  # these carry their sources with them
        with pytest.raises(MissingPassageError, match="deleted"):
            restore_sources(replaced, store)


def test_another_bundle_than_the_stores(app: App, make_tiny_bundle: Callable[..., Any], tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, app.bundle, key=b"k" * 32) as store:
        old = CompressedContextPostprocessor(store, replace_text=True).postprocess_nodes(app.nodes())[0].text
    other = make_tiny_bundle(seed=9)
    with pytest.raises(FingerprintMismatchError, match="index again"):
        SoftContextStore(tmp_path, other, key=b"k" * 32)
    with SoftContextStore(tmp_path, other, collection="new", key=b"k" * 32) as new:
        new.add(PASSAGES, progress=False)
        # From a saved chat: the passage is there, and the vectors that were meant are not.
        with pytest.raises(MissingPassageError, match="retrieve again"):
            CompressedContextLLM(store=new).complete(old)
        assert str(engine_on(new, app.index).query(QUESTION))


@contextmanager
def hooked(app: App, hook: Callable[..., Any]) -> Iterator[None]:
    handle = app.bundle.backbone.model.model.layers[1].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


async def test_out_of_memory_is_said_and_passes(app: App) -> None:
    engine, streaming = app.engine(), app.engine(streaming=True)
    expected = str(await engine.aquery(QUESTION))

    def more_than_there_is(*_: Any) -> None:
        torch.empty(1 << 50)  # the allocator's own refusal

    with hooked(app, more_than_there_is):
        with pytest.raises(DecoderMemoryError, match="use a coarser ratio"):
            await asyncio.to_thread(engine.query, QUESTION)
        with pytest.raises(DecoderMemoryError, match="use a coarser ratio"):
            await engine.aquery(QUESTION)
        with pytest.raises(DecoderMemoryError, match="use a coarser ratio"):
            await asyncio.to_thread(lambda: list(streaming.query(QUESTION).response_gen))
        with pytest.raises(DecoderMemoryError, match="use a coarser ratio"):
            response = await streaming.aquery(QUESTION)
            [piece async for piece in response.async_response_gen()]
    assert str(await engine.aquery(QUESTION)) == expected


@contextmanager
def forwards(app: App) -> Iterator[list[int]]:
    """How many forward passes the decoder has made; each takes a while."""
    made: list[int] = []

    def slow(*_: Any) -> None:
        made.append(1)
        time.sleep(0.01)

    with hooked(app, slow):
        yield made


async def _settled(made: list[int]) -> int:
    """The number of passes once the decoder rests."""
    while True:
        before = len(made)
        await asyncio.sleep(0.2)
        if len(made) == before:
            return before


@pytest.mark.parametrize("way", ["acomplete", "astream_complete", "stream_complete"])
async def test_whoever_stops_listening_gives_the_decoder_back(app: App, way: str) -> None:
    """A cancelled task or a stream left early ends the generation within a few tokens, not at its end."""
    llm = app.llm(max_tokens=200)
    prompt = app.store.marker("n0", RATIO) + QUESTION
    with forwards(app) as made:
        if way == "acomplete":
            task = asyncio.create_task(llm.acomplete(prompt))
            while len(made) < 3:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "astream_complete":
            stream = await llm.astream_complete(prompt)
            await anext(stream)
            await stream.aclose()
        else:
            blocking = llm.stream_complete(prompt)
            await asyncio.to_thread(next, blocking)
            await asyncio.to_thread(blocking.close)
        assert 0 < await _settled(made) < 100
    full = app.answer([{"role": "user", "content": prompt}], max_new_tokens=200)
    assert full.completion_tokens > 100
    assert (await llm.acomplete(prompt)).text == full.text


async def test_a_cancelled_engine(app: App) -> None:
    engine = app.engine()
    expected = str(await engine.aquery(QUESTION))
    with app.bundle.backbone.lock:
        task = asyncio.create_task(engine.aquery(QUESTION))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert str(await engine.aquery(QUESTION)) == expected


async def test_threads_and_tasks_on_one_llm_answer_as_one_after_another(app: App) -> None:
    """Engines, chats and plain prompts, with and without slots, at once."""
    llm = app.llm()
    postprocessor = app.postprocessor()

    def engine(mode: str) -> Any:
        return app.index.as_query_engine(llm=llm, response_mode=mode, node_postprocessors=[postprocessor])

    engines = [engine("compact"), engine("refine")]
    questions = [QUESTION, "What is sold as Old Gold?", "Where is a market held in January?"]
    work: list[Callable[[], str]] = [lambda e=e, q=q: str(e.query(q)) for e in engines for q in questions]
    work += [lambda q=q: llm.complete(q).text for q in questions]
    work += [lambda i=i: list(llm.stream_complete(app.store.marker(f"n{i}", 4) + "?"))[-1].text for i in range(3)]

    def run() -> list[list[str]]:
        alone = [each() for each in work]
        with ThreadPoolExecutor(4) as pool:
            return [alone, list(pool.map(lambda each: each(), work))]

    alone, together = await asyncio.to_thread(run)
    assert together == alone and len(set(alone)) > len(work) // 2
    tasks = [e.aquery(q) for e in engines for q in questions]
    assert [str(response) for response in await asyncio.gather(*tasks)] == alone[: len(tasks)]


def test_a_node_of_two_indexes(app: App, tmp_path: Path) -> None:
    """Two indexes that count their nodes from one: the ids meet, the texts differ, and neither is lost."""
    client = chromadb.PersistentClient(str(tmp_path))
    index = index_in(client.create_collection("other"))
    index.insert_nodes([TextNode(id_="n0", text="The harbour of Quell was built by Ann Dray in 1700.")])
    nodes = [*app.nodes()[:1], *index.as_retriever().retrieve(QUESTION)]
    assert nodes[0].node_id == nodes[1].node_id == "n0"
    with SoftContextStore(client, app.bundle, collection="both") as store:
        marked = CompressedContextPostprocessor(store, ratio=RATIO).postprocess_nodes(nodes)
        assert restore_sources(marked) == nodes
        shown = [store.split(node.node.get_content(MetadataMode.LLM).split("\n\n")[-1]) for node in marked]
        assert [store.text_of(parts) for parts in shown] == [[nodes[0].text], [nodes[1].text]]
