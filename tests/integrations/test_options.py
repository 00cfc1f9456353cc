"""Options as people write them, given to a constructor, a call, or `bind`."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ctx_compress_rag import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, RatioError
from helpers.frameworks import FRAMEWORKS, LangChain, LlamaIndex
from helpers.langchain import App

PLAIN: dict[str, Any] = {"max_tokens": 24, "temperature": 2.0, "top_p": 0.9, "top_k": 40, "seed": 7}
WRITTEN: dict[str, Any] = {"max_tokens": 24.0, "temperature": 2, "top_p": "0.9", "top_k": "40", "seed": 7.0}
Ask = Callable[..., str]


def bound(llm: Any, prompt: str, **options: Any) -> Any:
    return LangChain.ask(llm.bind(**options), prompt)


@pytest.fixture(params=[LangChain.ask, bound, LangChain.stream, LlamaIndex.ask, LlamaIndex.stream])
def ask(app: App, request: pytest.FixtureRequest) -> Ask:
    """The answer of an LLM with options of its own and options of the call."""
    llm = LlamaIndex.llm if "LlamaIndex" in request.param.__qualname__ else LangChain.llm
    return lambda own, given: request.param(llm(store=app.store, **own), "Hello", **given)[0]


def test_options_are_the_decoders_sampling(app: App, ask: Ask) -> None:
    def answer(**options: Any) -> str:
        return Decoder(app.bundle).generate([[{"role": "user", "content": "Hello"}]], Sampling(**options))[0].text

    stop = answer(**PLAIN)[4:7]
    given, written = PLAIN | {"stop": [stop]}, WRITTEN | {"stop": stop}
    expected = answer(**given)
    for name in given:  # each of them changes the answer
        assert name == "max_tokens" or answer(**{k: v for k, v in given.items() if k != name}) != expected
    assert ask(written, {}) == ask({}, written) == ask(PLAIN, {"stop": ["never there", stop]}) == expected
    assert ask(given, {"stop": [], "max_tokens": 5}) == answer(**PLAIN | {"max_tokens": 5})
    for name in [*given, "extractive"]:
        assert ask(given, {name: None}) == expected
    assert ask(given | {"top_k": None, "stop": None, "extractive": None}, {}) == answer(**PLAIN | {"top_k": 0})


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 2**70), ("temperature", "warm"), ("max_length", 3), ("stop", [1]), ("top_k", -2)]
)
def test_impossible_and_unknown_options_are_refused(ask: Ask, name: str, value: Any) -> None:
    for own, given in (({name: value}, {}), ({}, {name: value})):
        with pytest.raises(ConfigError, match=name):
            ask(own, given)


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
