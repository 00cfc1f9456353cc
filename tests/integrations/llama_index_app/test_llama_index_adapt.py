"""`llm.adapt` in LlamaIndex; what it shares with LangChain: langchain_app/test_langchain_adapt.py."""

from __future__ import annotations

from llama_index.core.base.llms.types import ChatMessage

from ctx_compress_rag.adaptation import BaseAdapter
from helpers.adaptation import DEMONSTRATIONS, merged_copy, random_adapter
from helpers.decoding import by_transformers
from helpers.llama_index import MAX_TOKENS, QUESTION, App


def change(app: App, seed: int) -> BaseAdapter:
    return BaseAdapter(random_adapter(app.bundle.backbone.model, rank=2, seed=seed))


async def test_an_adapted_llm_answers_with_the_update(app: App) -> None:
    """As the model does whose weights hold the update; the original answers as before."""
    llm, adaptation = app.llm(), change(app, 1)
    before = llm.complete(QUESTION).text
    adapted = llm.adapt(DEMONSTRATIONS, adaptation)
    merged = merged_copy(app.bundle.backbone.model, adaptation.base)
    expected = by_transformers(merged, app.bundle.tokenizer, [{"role": "user", "content": QUESTION}], MAX_TOKENS)
    assert expected != before
    message = [ChatMessage(role="user", content=QUESTION)]
    assert adapted.complete(QUESTION).text == adapted.chat(message).message.content == expected
    assert (await adapted.acomplete(QUESTION)).text == list(adapted.stream_complete(QUESTION))[-1].text == expected
    assert llm.complete(QUESTION).text == before
    assert adapted.metadata == llm.metadata and adapted.max_tokens == llm.max_tokens
