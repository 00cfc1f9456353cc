"""The LangChain chat model: usage, sampling, refusals, streams, caching."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from ctx_compress_rag import SoftContextStore
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.store import marker as markers
from helpers.decoding import prefills
from helpers.langchain import QUESTION, SOURCES, TOKENS, App
from langchain_ctx_compress import ChatCompressedContext


async def test_usage_counts_slots(app: App) -> None:
    [tower, mill] = app.postprocessor(ratio=4).invoke(SOURCES[:2])
    prompt = [
        SystemMessage(tower.page_content),
        HumanMessage("Hello"),
        AIMessage("Ask."),
        HumanMessage(f"{mill.page_content} {QUESTION}"),
    ]
    llm = app.llm()
    with prefills(app.bundle.backbone.model) as seen:
        message = llm.invoke(prompt)
    usage = message.usage_metadata
    assert usage["input_tokens"] == len(seen[0]) == llm.get_num_tokens_from_messages(prompt)
    assert llm.get_num_tokens_from_messages([]) == 0  # LangChain asks for it as it trims
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert message.response_metadata == {
        "model_name": "tiny",
        "model_provider": "ctx-compress",
        "finish_reason": "length",
        "slots": app.slots("tower", 4) + app.slots("mill", 4),
    }
    stopped = llm.invoke(prompt, stop=[message.content[4:7]])
    assert stopped.response_metadata["finish_reason"] == "stop"
    for chunks in (list(llm.stream(prompt)), [chunk async for chunk in llm.astream(prompt)]):
        whole = sum(chunks[1:], chunks[0])
        assert whole.content == message.content
        assert whole.usage_metadata == usage
        assert whole.response_metadata == message.response_metadata
        assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]), "only text"),
        (ToolMessage("7", tool_call_id="1"), "'tool'"),
        (" ", "empty"),
        ([], "no messages"),
    ],
)
def test_messages_that_a_text_decoder_cannot_read(app: App, message: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        app.llm().invoke(message if isinstance(message, str | list) else [message])


def test_tools_are_refused_in_words(app: App) -> None:
    def look_up(name: str) -> str:
        """Look a name up."""
        return name

    none = app.llm().bind_tools([], strict=True, max_tokens=2)
    assert none.invoke(QUESTION).content == app.llm(max_tokens=2).invoke(QUESTION).content
    agent = create_agent(app.llm(), tools=[look_up])
    asks = [lambda: app.llm().bind_tools([look_up]), lambda: agent.invoke({"messages": [HumanMessage(QUESTION)]})]
    for ask in asks:
        with pytest.raises(NotImplementedError, match="ChatCompressedContext calls no tools: leave them out"):
            ask()


def test_cache_is_keyed_by_what_the_answer_depends_on(
    app: App, make_tiny_bundle: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = InMemoryCache()
    [tower] = app.postprocessor().invoke(SOURCES[:1])
    with prefills(app.bundle.backbone.model) as seen:
        first = app.llm(cache=cache).invoke(tower.page_content)
        assert app.llm(cache=cache).invoke(tower.page_content).content == first.content
        assert len(seen) == 1
        app.llm(cache=cache, scope="other", on_unreadable="text").invoke(tower.page_content)
        with markers.scope("another"):
            app.llm(cache=cache, on_unreadable="text").invoke(tower.page_content)
        app.llm(cache=cache, max_tokens=3).invoke(tower.page_content)
        app.llm(cache=cache, extractive=True).invoke(tower.page_content)
        assert len(seen) == 5
    keys = [app.llm(**engine)._identifying_params for engine in ({}, {"merge": True}, {"engine": "http://localhost:1"})]
    assert keys[0] != keys[1] != keys[2] and "float32" in str(keys[0])
    with monkeypatch.context() as patch:  # the same slots, read with other weights
        patch.setattr(app.bundle, "config", app.bundle.config.model_copy(update={"reader_share": 0.5}))
        assert app.llm()._identifying_params != keys[0]
    # Another bundle of the same name, asked in the same words.
    own = app.llm(cache=cache).invoke(QUESTION).content
    with SoftContextStore(tmp_path, make_tiny_bundle(seed=9)) as store, prefills(store.bundle.backbone.model) as seen:
        ChatCompressedContext(store=store, cache=cache, max_tokens=TOKENS).invoke(QUESTION)
        assert len(seen) == 1
    assert app.llm(cache=cache).invoke(QUESTION).content == own


async def test_stop_strings_of_the_model_are_part_of_the_cache_key(app: App) -> None:
    cache, whole = InMemoryCache(), app.llm().invoke(QUESTION).text
    stop = whole[len(whole) // 2 :][:3]
    assigned = app.llm(cache=cache)
    assert app.llm(cache=cache).invoke(QUESTION).text == whole
    assigned.stop = [stop]
    for llm in (assigned, app.llm(cache=cache, stop=[stop]), app.llm(cache=cache).bind(stop=[stop])):
        for message in (llm.invoke(QUESTION), llm.batch([QUESTION])[0], await llm.ainvoke(QUESTION)):
            assert message.text == whole[: whole.index(stop)]
    assert app.llm(cache=cache).invoke(QUESTION).text == whole


def test_logprobs_have_openais_shape(app: App) -> None:
    marker, llm = app.store.marker("tower", 4), app.llm(logprobs=True, top_logprobs=2)
    *_, last = app.llm().bind(logprobs=True, top_logprobs=2).stream(marker)
    for message in (answer := llm.invoke(marker), last):
        content = message.response_metadata["logprobs"]["content"]
        assert "".join(each["token"] for each in content) == answer.text
        assert all(bytes(each["bytes"]).decode() == each["token"] for each in content)
        assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] < 0 for each in content)


def test_a_chat_is_summarized_when_its_slots_fill_the_budget(app: App) -> None:
    """`SummarizationMiddleware` believes the usage that a model of the same provider reports."""
    marker = app.store.marker("tower", 4)
    llm = app.llm()
    usage = llm.invoke(f"{marker} Who?")
    messages = [HumanMessage(f"{marker} Who?"), usage, HumanMessage("And when?")]
    brief: Any = {"keep": ("messages", 1), "summary_prompt": "Summarize: {messages}"}
    most = usage.usage_metadata["total_tokens"] - 1
    middleware = SummarizationMiddleware(llm, trigger=("tokens", most), **brief)
    assert middleware.before_model({"messages": messages}, None) is not None
    patient = SummarizationMiddleware(llm, trigger=("tokens", most + 1000), **brief)
    assert patient.before_model({"messages": messages}, None) is None
    assert llm.profile["max_input_tokens"] == app.bundle.backbone.window  # which it takes fractions of
