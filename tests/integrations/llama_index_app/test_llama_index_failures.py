"""What goes wrong in a LlamaIndex app; of a store or a listener that is gone: langchain_app/test_failures.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ctx_compress_rag.errors import MissingPassageError
from ctx_compress_rag.store import SoftContextStore
from helpers.llama_index import QUESTION, App
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor, restore_sources


def test_a_deleted_replaced_text_cannot_be_restored(app: App, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, app.bundle) as store:
        kept = CompressedContextPostprocessor(store).postprocess_nodes(app.nodes())
        replaced = CompressedContextPostprocessor(store, replace_text=True).postprocess_nodes(app.nodes())
        store.delete(["n0"])
        assert restore_sources(kept, store) == app.nodes()  # these carry their sources with them
        with pytest.raises(MissingPassageError, match="deleted"):
            restore_sources(replaced, store)


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
