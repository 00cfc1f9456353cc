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
from llama_index.core.schema import TextNode

from ctx_compress_rag.errors import MissingPassageError, StoreError
from ctx_compress_rag.stores import SoftContextStore
from helpers.llama_index import MAX_TOKENS, QUESTION, RATIO, App
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


def test_a_deleted_replaced_text_cannot_be_restored(app: App, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, app.bundle) as store:
        kept = CompressedContextPostprocessor(store).postprocess_nodes(app.nodes())
        replaced = CompressedContextPostprocessor(store, replace_text=True).postprocess_nodes(app.nodes())
        store.delete(["n0"])
        assert restore_sources(kept, store) == app.nodes()  # these carry their sources with them
        with pytest.raises(MissingPassageError, match="deleted"):
            restore_sources(replaced, store)


@contextmanager
def hooked(app: App, hook: Callable[..., Any]) -> Iterator[None]:
    with app.bundle.backbone.model.model.layers[1].register_forward_pre_hook(hook):
        yield


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
