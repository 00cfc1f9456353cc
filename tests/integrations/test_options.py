"""Options as people write them, given to a constructor, a call, or `bind`."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, RatioError
from helpers.frameworks import FRAMEWORKS, LangChain
from helpers.langchain import App
from helpers.store import WordBundle


@FRAMEWORKS
def test_options_are_the_decoders_sampling(app: App, framework: Any) -> None:
    """In the words of people; those of a call come first, and None stands for those of the LLM."""
    written = {"max_tokens": 24.0, "temperature": 2, "top_p": "0.9", "top_k": "40", "seed": 7.0, "stop": "xyz"}
    sampling = Sampling(max_tokens=24, temperature=2.0, top_p=0.9, top_k=40, seed=7, stop=("xyz",))
    plain, own = framework.llm(store=app.store), framework.llm(store=app.store, extractive=None, **written)
    assert own.sampling({}) == own.sampling(dict.fromkeys(written)) == plain.sampling(written) == sampling
    assert own.sampling({"max_tokens": 5, "stop": []}) == sampling.model_copy(update={"max_tokens": 5, "stop": ()})
    [expected] = Decoder(app.bundle).generate([[{"role": "user", "content": "Hello"}]], sampling)
    for ask in (framework.ask, framework.stream):
        assert ask(own, "Hello") == ask(plain, "Hello", **written) == (expected.text, 0)
    if framework is LangChain:
        assert plain.bind(**written).invoke("Hello").text == expected.text


@FRAMEWORKS
@pytest.mark.parametrize(("name", "value"), [("temperature", "warm"), ("max_length", 3), ("stop", [1])])
def test_impossible_and_unknown_options_are_refused(app: App, framework: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        framework.llm(store=app.store, **{name: value})
    with pytest.raises(ConfigError, match=name):
        framework.ask(framework.llm(store=app.store), "Hello", **{name: value})


@FRAMEWORKS
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ratio": 8, "token_budget": 20}, ConfigError, "ratio=8 and token_budget=20"),
        ({"ratio": 6}, RatioError, "ratio 6 cannot be made"),
        ({"on_missing": "panic"}, ConfigError, "on_missing.*'panic'"),
        ({"store": "./chroma"}, ConfigError, "SoftContextStore .*chroma"),
        ({"ration": 8}, ConfigError, "'ratio'"),
    ],
)
def test_a_postprocessor_refuses_impossible_options(
    app: App, framework: Any, options: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        framework.postprocessor(**{"store": app.store, **options})
    assert framework.postprocessor(store=app.store, ratio="16").ratio == 16


@FRAMEWORKS
def test_what_only_compresses_is_no_model(tmp_path: Path, framework: Any) -> None:
    with (
        SoftContextStore(tmp_path, WordBundle()) as store,  # type: ignore[arg-type]
        pytest.raises(ConfigError, match="'words' has no decoder"),
    ):
        framework.llm(store=store)


@FRAMEWORKS
def test_what_the_decoder_is_made_with_cannot_change(app: App, framework: Any) -> None:
    """It would change nothing once the LLM has answered; options of an answer can change."""
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
