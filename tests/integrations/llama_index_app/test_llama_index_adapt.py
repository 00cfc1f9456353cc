"""`llm.adapt` in LlamaIndex: adapted LLMs beside the original, in engines, saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage

from ctx_compress_rag.adaptation import BaseAdapter, FewShot, PromptTuning
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.store import SoftContextStore
from helpers.adaptation import DEMONSTRATIONS, merged_copy, random_adapter
from helpers.decoding import by_transformers
from helpers.llama_index import MAX_TOKENS, QUESTION, App
from llama_index.llms.ctx_compress import CompressedContextLLM


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


def test_saved_and_loaded(app: App, tmp_path: Path) -> None:
    llm = app.llm()
    adapted = llm.adapt(DEMONSTRATIONS, change(app, 4))
    adapted.save_adapter(tmp_path / "adapter")
    answer = adapted.complete(QUESTION).text
    assert answer != llm.complete(QUESTION).text
    assert llm.with_adapter(tmp_path / "adapter").complete(QUESTION).text == answer
    assert llm.adapt(DEMONSTRATIONS, tmp_path / "adapter").complete(QUESTION).text == answer
    assert app.llm(predictor=tmp_path / "adapter").adapt(DEMONSTRATIONS).complete(QUESTION).text == answer
    with pytest.raises(ConfigError, match="nothing"):
        llm.save_adapter(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="predictor"):
        llm.adapt(DEMONSTRATIONS)
    with pytest.raises(ConfigError, match="one demonstration or more"):
        llm.adapt([], change(app, 4))


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


def test_demonstrations_from_the_store(app: App, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, app.bundle) as store:
        llm = CompressedContextLLM(store=store, max_tokens=MAX_TOKENS)
        adapted = llm.adapt(DEMONSTRATIONS, FewShot(None), ratio=8)
        assert len(store) == len({passage for d in DEMONSTRATIONS for passage in d.passages})
        usage = adapted.complete(QUESTION).raw
        assert usage["slots"] == sum(
            -(-app.tokens(passage) // 8) for d in DEMONSTRATIONS for passage in d.passages
        )  # fmt: skip
