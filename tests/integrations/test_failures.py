"""What goes wrong in an app of LangChain or LlamaIndex, and what it then hears."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import chromadb
import pytest
from llama_index.core.schema import TextNode

from ctx_compress_rag import SoftContextStore
from ctx_compress_rag.errors import StoreError
from helpers.frameworks import FRAMEWORKS, LangChain, LlamaIndex
from helpers.langchain import QUESTION, TEXTS, App, while_the_decoder_is_taken
from helpers.server import chroma_server
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressSoftContext


@pytest.mark.parametrize(
    ("package", "core", "extra"),
    [
        ("langchain_ctx_compress", "langchain_core", "langchain"),
        ("llama_index.postprocessor.ctx_compress", "llama_index.core", "llama-index"),
        ("llama_index.llms.ctx_compress", "llama_index.core", "llama-index"),
    ],
)
def test_without_the_framework_the_extra_is_named(package: str, core: str, extra: str) -> None:
    code = f"import sys; sys.modules[{core!r}] = None; import {package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert f"pip install 'ctx-compress-rag[{extra}]'" in done.stderr


def test_a_store_that_cannot_be_reached(talkative: Any, tmp_path: Path) -> None:
    with chroma_server(tmp_path) as port:
        store = SoftContextStore(chromadb.HttpClient("127.0.0.1", port), talkative, key=b"k" * 32)
        store.add([TEXTS["tower"]], ["tower"], progress=False)
        marker = store.marker("tower", 4)
    calls = [lambda: CompressSoftContext(store=store)([TextNode(text="A new text.")])]
    for framework in (LangChain, LlamaIndex):
        llm, found = framework.llm(store=store, max_tokens=4), [framework.found(TEXTS["tower"], "tower")]
        calls += [
            lambda f=framework, found=found: f.mark(found, store=store),
            lambda f=framework: f.restore([f.found(marker)], store),
            lambda f=framework, llm=llm: f.ask(llm, marker),
            lambda f=framework, llm=llm: f.stream(llm, marker),
            lambda f=framework, llm=llm: asyncio.run(f.in_loop(llm, marker)),
        ]
        assert framework.ask(llm, QUESTION)[0]  # what needs no store is answered
    for call in calls:
        with pytest.raises(StoreError, match=r"Chroma server .*does not answer .*: check that it runs"):
            call()


@pytest.mark.parametrize("way", ["ainvoke", "astream", "acomplete", "astream_complete"])
async def test_whoever_stops_listening_gives_the_decoder_back(app: App, way: str) -> None:
    """A canceled task or a stream left early ends the generation within a few tokens, not at its end."""
    steps: list[int] = []
    llm, llama = app.llm(max_tokens=400), CompressedContextLLM(store=app.store, max_tokens=400)

    with app.bundle.backbone.model.register_forward_pre_hook(lambda *_: steps.append(1)):
        if "stream" in way:
            stream: Any = llm.astream(QUESTION) if way == "astream" else await llama.astream_complete(QUESTION)
            await anext(stream)
            await stream.aclose()
        else:
            ask: Any = llm.ainvoke if way == "ainvoke" else llama.acomplete
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


@FRAMEWORKS
async def test_generation_leaves_the_event_loop_free(app: App, framework: Any) -> None:
    llm = framework.llm(store=app.store, max_tokens=8)
    answers = await while_the_decoder_is_taken(app.bundle, framework.in_loop(llm, QUESTION))
    assert answers == [framework.ask(llm, QUESTION)] * 2
