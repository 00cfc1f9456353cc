"""`llm.adapt` in LlamaIndex; what it shares with LangChain: langchain_app/test_langchain_adapt.py."""

from __future__ import annotations

import torch
from llama_index.core.base.llms.types import ChatMessage

from ctx_compress_rag.adaptation import BaseAdapter, FewShot, PromptTuning
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


def test_what_stands_before_every_prompt_is_taken_from_the_window(app: App) -> None:
    llm = app.llm()
    shots = llm.adapt(DEMONSTRATIONS, FewShot(None))
    chat = [ChatMessage(role="user", content=QUESTION)]
    earlier = []
    for demonstration in DEMONSTRATIONS:
        earlier += [ChatMessage(role=turn["role"], content=turn["content"]) for turn in demonstration.chat()]
        earlier.append(ChatMessage(role="assistant", content=demonstration.answer))
    answered = llm.chat([*earlier, *chat])
    assert shots.chat(chat).message.content == answered.message.content
    taken = answered.raw["usage"]["prompt_tokens"] - llm.chat(chat).raw["usage"]["prompt_tokens"]
    assert shots.metadata.context_window == llm.metadata.context_window - taken
    prefixed = llm.adapt(DEMONSTRATIONS, PromptTuning(torch.randn(5, app.bundle.backbone.dim)))
    assert prefixed.metadata.context_window == llm.metadata.context_window - 5
