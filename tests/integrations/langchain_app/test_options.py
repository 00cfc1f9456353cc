"""Options of the LLM classes as people write them, given to a constructor, a call, or `bind`."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage

from ctx_compress_rag.errors import ConfigError, RatioError
from ctx_compress_rag.marking.mark import mark
from helpers.langchain import App
from langchain_ctx_compress import ChatCompressedContext
from langchain_ctx_compress import CompressedContextPostprocessor as LangChainPostprocessor
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor

OPTIONS = ["max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "extractive"]
WRITTEN: dict[str, Any] = {"max_tokens": 6.0, "temperature": 1, "top_p": 1, "top_k": "5", "stop": "zzz", "seed": 7.0}
PLAIN: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 5, "stop": ["zzz"], "seed": 7}


def langchain(app: App, own: dict[str, Any], given: dict[str, Any]) -> str:
    return str(ChatCompressedContext(store=app.store, **own).invoke("Hello", **given).content)


def langchain_bind(app: App, own: dict[str, Any], given: dict[str, Any]) -> str:
    return str(ChatCompressedContext(store=app.store, **own).bind(**given).invoke("Hello").content)


def langchain_stream(app: App, own: dict[str, Any], given: dict[str, Any]) -> str:
    return "".join(chunk.text for chunk in ChatCompressedContext(store=app.store, **own).stream("Hello", **given))


def llama_complete(app: App, own: dict[str, Any], given: dict[str, Any]) -> str:
    return CompressedContextLLM(store=app.store, **own).complete("Hello", **given).text


def llama_stream(app: App, own: dict[str, Any], given: dict[str, Any]) -> str:
    messages = [ChatMessage(role="user", content="Hello")]
    return [r.message.content for r in CompressedContextLLM(store=app.store, **own).stream_chat(messages, **given)][-1]


WAYS = [langchain, langchain_bind, langchain_stream, llama_complete, llama_stream]


@pytest.mark.parametrize("way", WAYS)
def test_numbers_as_people_write_them(app: App, way: Any) -> None:
    plain = way(app, PLAIN, {})
    assert way(app, WRITTEN, {}) == way(app, {}, WRITTEN) == way(app, {"seed": 1}, PLAIN) == plain
    assert plain != way(app, {**PLAIN, "seed": 8}, {})


@pytest.mark.parametrize("way", WAYS)
def test_each_option_does_what_it_says(app: App, way: Any) -> None:
    long, warm = {"max_tokens": 24}, {"max_tokens": 24, "temperature": 2.0, "seed": 3}
    greedy, sampled = way(app, long, {}), way(app, warm, {})
    assert way(app, long, warm) == sampled != greedy != way(app, warm, {"seed": 4}) != sampled
    for certain in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}):
        assert way(app, warm, certain) == greedy
    short = way(app, long, {"max_tokens": 2})
    assert greedy.startswith(short) and len(short) < len(greedy)
    stop = greedy[4:7]
    for own, given in ((long | {"stop": stop}, {}), (long, {"stop": ["never there", stop]})):
        assert way(app, own, given) == greedy[: greedy.index(stop)]
    assert way(app, long | {"stop": [stop]}, {"stop": []}) == greedy


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIONS)
def test_none_leaves_what_there_is(app: App, way: Any, name: str) -> None:
    assert way(app, PLAIN, {name: None}) == way(app, PLAIN, {})
    others = {key: value for key, value in PLAIN.items() if key != name}
    if name == "max_tokens":  # the default takes seconds: the answer ends at what its 24 tokens end with
        others["stop"] = [way(app, {**PLAIN, "max_tokens": 24}, {})[-3:]]
    if name != "seed":  # without one, no two answers are the same
        assert way(app, {**others, name: None}, {}) == way(app, others, {})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", "a"), ("seed", 2**70), ("temperature", "warm"), ("max_tokens", 0), ("max_tokens", 1.5), ("top_k", -1),
     ("top_p", 2), ("stop", [1]), ("stop", ""), ("stop", b"END"), ("stop", [""]), ("temperature", float("nan"))],
)  # fmt: skip
def test_impossible_values_are_refused_everywhere(app: App, way: Any, name: str, value: Any) -> None:
    for own, given in (({name: value}, {}), ({}, {name: value})):
        with pytest.raises(ConfigError, match=name.removeprefix("max_")):
            way(app, own, given)


@pytest.mark.parametrize("way", WAYS)
def test_unknown_options_are_named_with_those_there_are(app: App, way: Any) -> None:
    with pytest.raises(ConfigError, match=r"has no option 'max_length' for a call: there are max_tokens, temperature"):
        way(app, {}, {"max_length": 3})
    with pytest.raises((ConfigError, ValueError), match="max_length"):
        way(app, {"max_length": 3}, {})


@pytest.mark.parametrize("ratio", [16.0, "16"])
def test_ratios_as_people_write_them(app: App, ratio: Any) -> None:
    [document] = app.retriever(k=1).invoke("Who built the old tower?")
    text = document.page_content
    expected = mark(app.store, [text], [document.id], ratio=16)
    assert LangChainPostprocessor(store=app.store, ratio=ratio).invoke([document])[0].page_content == expected[0]
    assert CompressedContextPostprocessor(app.store, ratio=ratio).ratio == 16
    [a], [b] = app.bundle.compress([text], ratio=ratio), app.bundle.compress([text], ratio=16)
    assert a.slots.equal(b.slots)
    [soft] = app.bundle.compress([text])
    assert app.bundle.at_ratio(soft, ratio).n_slots == app.bundle.at_ratio(soft, 16).n_slots


@pytest.mark.parametrize("ratio", ["soft", 16.5, [16]])
def test_what_is_no_whole_number_is_refused(app: App, ratio: Any) -> None:
    for wrong in (
        lambda: mark(app.store, ["A text."], ratio=ratio),
        lambda: mark(app.store, ["A text."], token_budget=ratio),
        lambda: app.bundle.compress(["A text."], ratio=ratio),
        lambda: LangChainPostprocessor(store=app.store, ratio=ratio),
        lambda: CompressedContextPostprocessor(app.store, token_budget=ratio),
    ):
        with pytest.raises(ConfigError):
            wrong()


@pytest.mark.parametrize("kind", [LangChainPostprocessor, CompressedContextPostprocessor])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ratio": 8, "token_budget": 20}, ConfigError, "ratio=8 and token_budget=20"),
        ({"ratio": 6}, RatioError, "ratio 6 cannot be made"),
        ({"ratio": "many"}, ConfigError, "'many'"),
        ({"token_budget": 0}, ConfigError, "token_budget=0"),
        ({"on_missing": "panic"}, ConfigError, "on_missing.*'panic'"),
        ({"store": "./chroma"}, ConfigError, "SoftContextStore .*chroma"),
        ({"rate": 8}, ConfigError, "rate"),
    ],
)
def test_a_postprocessor_refuses_impossible_options(
    app: App, kind: Any, options: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**{"store": app.store, **options})


@pytest.mark.parametrize("llm", [ChatCompressedContext, CompressedContextLLM])
def test_what_the_decoder_is_made_with_cannot_change(app: App, llm: Any) -> None:
    """It would change nothing once the LLM has answered; options of an answer can change."""
    one = llm(store=app.store)
    for name, value in {"store": app.store, "on_unreadable": "text", "batch_size": 2, "server": "http://x"}.items():
        with pytest.raises(ValueError, match=f"{name}\n.*frozen"):
            setattr(one, name, value)
    one.max_tokens = 1
    assert one.max_tokens == 1
