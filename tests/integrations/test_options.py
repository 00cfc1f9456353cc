"""Options as people write them, given to a constructor, a call, or `bind`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ctx_compress_rag.errors import ConfigError, RatioError
from helpers.frameworks import FRAMEWORKS, LangChain, LlamaIndex
from helpers.langchain import App

PLAIN: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 5, "stop": ["zzz"], "seed": 7}
WRITTEN: dict[str, Any] = {"max_tokens": 6.0, "temperature": 1, "top_p": 1, "top_k": "5", "stop": "zzz", "seed": 7.0}
Ask = Callable[..., str]


def bound(llm: Any, prompt: str, **options: Any) -> Any:
    return LangChain.ask(llm.bind(**options), prompt)


@pytest.fixture(params=[LangChain.ask, bound, LangChain.stream, LlamaIndex.ask, LlamaIndex.stream])
def ask(app: App, request: pytest.FixtureRequest) -> Ask:
    """The answer of an LLM with options of its own and options of the call."""
    llm = LlamaIndex.llm if "LlamaIndex" in request.param.__qualname__ else LangChain.llm
    return lambda own, given: request.param(llm(store=app.store, **own), "Hello", **given)[0]


def test_each_option_does_what_it_says(ask: Ask) -> None:
    long, warm = {"max_tokens": 24}, {"max_tokens": 24, "temperature": 2.0, "seed": 3}
    greedy, sampled = ask(long, {}), ask(warm, {})
    assert ask(long, warm) == sampled != greedy != ask(warm, {"seed": 4}) != sampled
    for certain in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}):
        assert ask(warm, certain) == greedy
    short = ask(long, {"max_tokens": 2})
    assert greedy.startswith(short) and len(short) < len(greedy)
    stop = greedy[4:7]
    for own, given in ((long | {"stop": stop}, {}), (long, {"stop": ["never there", stop]})):
        assert ask(own, given) == greedy[: greedy.index(stop)]
    assert ask(long | {"stop": [stop]}, {"stop": []}) == greedy
    assert ask(WRITTEN, {}) == ask({}, WRITTEN) == ask(PLAIN, {})


def test_none_leaves_what_there_is(ask: Ask) -> None:
    expected = ask(PLAIN, {})
    for name in [*PLAIN, "extractive"]:
        assert ask(PLAIN, {name: None}) == expected
    assert ask({**PLAIN, "top_k": None, "stop": None, "extractive": None}, {}) == ask({**PLAIN, "top_k": 0}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 2**70), ("temperature", "warm"), ("max_tokens", 0), ("top_k", -2), ("top_p", 2), ("stop", [1])],
)
def test_impossible_values_are_refused_everywhere(ask: Ask, name: str, value: Any) -> None:
    for own, given in (({name: value}, {}), ({}, {name: value})):
        with pytest.raises(ConfigError, match=name.removeprefix("max_")):
            ask(own, given)


def test_an_unknown_option_is_named_with_the_nearest(ask: Ask) -> None:
    with pytest.raises(ConfigError, match="'max_length'.*'max_tokens'"):
        ask({}, {"max_length": 3})
    with pytest.raises(ConfigError, match="'max_length'.*'max_tokens'"):
        ask({"max_length": 3}, {})


@FRAMEWORKS
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ratio": 8, "token_budget": 20}, ConfigError, "ratio=8 and token_budget=20"),
        ({"ratio": 6}, RatioError, "ratio 6 cannot be made"),
        ({"ratio": "many"}, ConfigError, "'many'"),
        ({"ratio": 16.5}, ConfigError, "16.5"),
        ({"token_budget": 0}, ConfigError, "token_budget=0"),
        ({"on_missing": "panic"}, ConfigError, "on_missing.*'panic'"),
        ({"store": "./chroma"}, ConfigError, "SoftContextStore .*chroma"),
        ({"rate": 8}, ConfigError, "rate"),
    ],
)
def test_a_postprocessor_refuses_impossible_options(
    app: App, framework: Any, options: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        framework.postprocessor(**{"store": app.store, **options})


@FRAMEWORKS
def test_a_ratio_may_be_written_as_text(app: App, framework: Any) -> None:
    assert framework.postprocessor(store=app.store, ratio="16").ratio == 16


@FRAMEWORKS
def test_what_the_decoder_is_made_with_cannot_change(app: App, framework: Any) -> None:
    """It would change nothing once the LLM has answered; options of an answer can change."""
    with pytest.raises(ConfigError, match="on_unreadable"):
        framework.llm(store=app.store, on_unreadable="never")
    with pytest.raises(ConfigError, match="batch_size"):
        framework.llm(store=app.store, batch_size=0)
    llm = framework.llm(store=app.store, batch_size=3)
    assert llm.decoder.engine.batch_size == 3 and llm.decoder.bundle is app.bundle
    for name, value in {"store": app.store, "on_unreadable": "text", "batch_size": 2, "engine": "http://x"}.items():
        with pytest.raises(ValueError, match=f"{name}\n.*frozen"):
            setattr(llm, name, value)
    llm.max_tokens = 1
    assert llm.max_tokens == 1


@FRAMEWORKS
def test_copies_share_the_model_and_pickles_are_refused(app: App, framework: Any) -> None:
    """LlamaIndex's own pickling would take the store out of the object at hand."""
    llm = framework.llm(store=app.store, max_tokens=4)
    for thing in (llm, framework.postprocessor(store=app.store)):
        twin = copy.deepcopy(thing)
        assert twin is not thing and twin.store is thing.store
        with pytest.raises(ConfigError, match="create it in the other process"):
            pickle.dumps(thing)
        assert thing.store is app.store
    answers = {framework.ask(each, "Hello") for each in (llm, copy.copy(llm), copy.deepcopy(llm))}
    assert len(answers) == 1
