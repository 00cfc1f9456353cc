"""LLMs of both frameworks: their options, what goes wrong, base models, adapted decoders, answers of a form."""

import asyncio
import copy
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypedDict

import chromadb
import pydantic.v1
import pytest
import torch
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import OutputParserException
from langchain_core.runnables import ConfigurableField
from llama_index.core.llms import ChatMessage
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.schema import TextNode
from llama_index.core.selectors import LLMMultiSelector
from llama_index.core.tools import QueryEngineTool

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.adaptation.adapt import adapt, with_adapter
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.predicted import PredictedUpdate
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, MissingExtraError, RatioError, StoreError
from helpers import llama_index
from helpers.adaptation import DEMONSTRATIONS, QUESTIONS, merged_copy, save_predictor
from helpers.decoding import WAIT, by_transformers
from helpers.frameworks import FRAMEWORKS, LangChain, LlamaIndex, every_way
from helpers.langchain import (
    CHAT,
    QUESTION,
    TEXTS,
    TOKENS,
    App,
    Tower,
    open_app,
    talkative_bundle,
    while_the_decoder_is_taken,
)
from helpers.server import chroma_server
from langchain_ctx_compress import ChatCompressedContext
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressSoftContext


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
        ({"store": ...}, ConfigError, "store is missing"),
        ({"ration": 8}, ConfigError, "'ratio'"),
    ],
)
def test_a_postprocessor_refuses_impossible_options(
    app: App, framework: Any, options: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        framework.postprocessor(**{k: v for k, v in {"store": app.store, **options}.items() if v is not ...})
    assert framework.postprocessor(store=app.store, ratio="16").ratio == 16


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


def test_it_is_asked_in_plain_text(make_tiny_bundle: Any, tmp_path: Path) -> None:
    """LangChain's chat ends with the cue; LlamaIndex's completions are what its `completion_to_prompt` makes."""
    bundle = talkative_bundle(make_tiny_bundle)
    bundle.backbone.tokenizer = tokenizer = copy.deepcopy(bundle.tokenizer)
    tokenizer.chat_template = None
    app = open_app(tmp_path, bundle)
    marker = app.store.marker("tower", 8)
    for framework, asked in ((LangChain, f"{QUESTION}\nAnswer:"), (LlamaIndex, QUESTION)):
        llm = framework.llm(store=app.store, max_tokens=TOKENS)
        expected = by_transformers(bundle.backbone.model, tokenizer, tokenizer(asked)["input_ids"], TOKENS)
        assert framework.ask(llm, QUESTION) == (expected, 0)
        answer, slots = framework.ask(llm, f"{marker} {QUESTION}")
        assert answer and slots > 0
    assert not llm.metadata.is_chat_model
    assert llm.predict(PromptTemplate("{it}"), it=QUESTION) == expected
    chatted = by_transformers(
        bundle.backbone.model, tokenizer, tokenizer(f"user: {QUESTION}\nassistant: ")["input_ids"], TOKENS
    )
    assert llm.chat([ChatMessage(QUESTION)]).message.content == chatted


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


@pytest.mark.parametrize("way", ["astream", "acomplete"])
async def test_whoever_stops_listening_gives_the_decoder_back(app: App, way: str) -> None:
    """A canceled task or a stream left early ends the generation within a few tokens, not at its end."""
    steps: list[int] = []
    gone = threading.Event()
    llm, llama = app.llm(max_tokens=80), CompressedContextLLM(store=app.store, max_tokens=80)

    def step(*_: Any) -> None:
        steps.append(1)
        assert len(steps) < 10 or gone.wait(WAIT)

    with app.bundle.backbone.model.register_forward_pre_hook(step):
        if way == "astream":
            stream: Any = llm.astream(QUESTION)
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.ensure_future(llama.acomplete(QUESTION))
            while not steps:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gone.set()
        await app.llm(max_tokens=1).ainvoke(QUESTION)  # waits for the decoder
    assert 0 < len(steps) < 15
    whole = llama.acomplete(QUESTION) if way == "acomplete" else llm.ainvoke(QUESTION)
    assert len(app.bundle.tokenizer((await whole).text)["input_ids"]) > 40


@FRAMEWORKS
async def test_generation_leaves_the_event_loop_free(app: App, framework: Any) -> None:
    llm = framework.llm(store=app.store, max_tokens=8)
    answers = await while_the_decoder_is_taken(app.bundle, framework.in_loop(llm, QUESTION))
    assert answers == [framework.ask(llm, QUESTION)] * 2


@pytest.fixture(scope="module")
def update(talkative: Any, tmp_path_factory: pytest.TempPathFactory) -> PredictedUpdate:
    folder = save_predictor(talkative, tmp_path_factory.mktemp("predictor"))
    return PredictedUpdate.from_pretrained(folder, Decoder(talkative))


@FRAMEWORKS
async def test_it_answers_with_the_predicted_update(app: App, update: PredictedUpdate, framework: Any) -> None:
    """As a plain transformers model into which the update is merged; the original answers as before."""
    llm = framework.llm(store=app.store, max_tokens=TOKENS)
    before = framework.ask(llm, QUESTION)
    weights = {name: p.clone() for name, p in app.bundle.backbone.model.named_parameters()}
    adapted = adapt(llm, DEMONSTRATIONS, update)
    plain = merged_copy(app.bundle.backbone.model, update.adapt(Decoder(app.bundle), DEMONSTRATIONS))
    expected = by_transformers(plain, app.bundle.tokenizer, [{"role": "user", "content": QUESTION}], TOKENS), 0
    assert await every_way(framework, adapted, QUESTION) == {expected} != {before}
    assert type(adapted) is type(llm) and adapted.max_tokens == llm.max_tokens
    assert framework.ask(llm, QUESTION) == before
    assert all(torch.equal(p, weights[name]) for name, p in app.bundle.backbone.model.named_parameters())
    assert adapted.decoder.bundle.backbone.model is llm.decoder.bundle.backbone.model


def test_several_side_by_side_in_threads(app: App, update: PredictedUpdate, tmp_path: Path) -> None:
    """None of them answers from a cache that another has filled; one can be adapted again, and its adapter saved."""
    llm = app.llm()
    models = [llm, adapt(llm, QUESTIONS, update), adapt(llm, [QUESTIONS[0], *DEMONSTRATIONS[1:]], update)]
    question = f"{app.store.marker('tower', 8)} {QUESTION}"
    alone = [model.invoke(question).text for model in models]
    assert len(set(alone)) == len(models)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda model: model.invoke(question).text, models * 2)) == alone * 2
    cached = app.llm(cache=InMemoryCache())
    assert [cached.invoke(question).text for _ in range(2)] == alone[:1] * 2
    assert adapt(cached, QUESTIONS, update).invoke(question).text == alone[1]
    assert adapt(models[2], QUESTIONS, update).invoke(question).text == alone[1]  # not on top of the first update
    models[1].decoder.bundle.adapter.save_pretrained(tmp_path)
    saved = Adapter.from_pretrained(tmp_path, app.bundle.backbone.model)
    assert with_adapter(llm, saved).invoke(question).text == alone[1]


def test_what_cannot_be_adapted_says_so(app: App, update: PredictedUpdate) -> None:
    with pytest.raises(ConfigError, match="nothing to adapt to"):
        adapt(app.llm(), [], update)
    with pytest.raises(ConfigError, match="with 3 demonstrations and was given 2"):
        adapt(app.llm(), DEMONSTRATIONS[:2], update)
    shown = replace(DEMONSTRATIONS[1], passages=(app.store.marker("tower", 8),))
    with pytest.raises(ConfigError, match="demonstration 1 holds markers"):
        adapt(app.llm(), [DEMONSTRATIONS[0], shown, DEMONSTRATIONS[2]], update)
    with pytest.raises(ConfigError, match="http://localhost:1"):
        adapt(app.llm(engine="http://localhost:1"), DEMONSTRATIONS, update)
    # LangChain would make a new model from the options alone.
    with pytest.raises(ConfigError, match=r"max_tokens to bind\(\)"):
        adapt(app.llm(), DEMONSTRATIONS, update).configurable_fields(max_tokens=ConfigurableField(id="longest"))


class TowerDict(TypedDict):
    built: int
    material: Literal["stone", "wood"]


class Old(pydantic.v1.BaseModel):
    arches: int


@pytest.fixture
def llm(app: App) -> ChatCompressedContext:
    return app.llm(max_tokens=120)


@pytest.fixture
def llama(app: App) -> CompressedContextLLM:
    return CompressedContextLLM(store=app.store, max_tokens=120)


async def test_a_pydantic_class_a_typed_dict_a_schema_and_a_tool(app: App, llm: ChatCompressedContext) -> None:
    chain = CHAT | llm.with_structured_output(Tower, method="json_schema", strict=True)
    given = {"context": app.store.marker("tower", 8), "input": "What is the tower made of?"}
    for answer in (chain.invoke(given), await chain.ainvoke(given), *chain.stream(given)):
        assert isinstance(answer, Tower)
    assert isinstance(llm.with_structured_output(Old).invoke("The tower?"), Old)
    said = llm.with_structured_output(TowerDict).invoke("The tower?")
    assert isinstance(said, dict) and set(said) == {"built", "material"} and isinstance(said["built"], int)
    function = {"name": "Tower", "description": "A tower.", "parameters": Tower.model_json_schema()}
    for schema in (Tower.model_json_schema(), function, {"type": "function", "function": function}):
        Tower.model_validate(llm.with_structured_output(schema).invoke("The tower?"))
    referring = {"title": "Year", "$ref": "#/$defs/year", "$defs": {"year": {"type": "boolean"}}}
    line = {"type": "string", "maxLength": 3}
    lines = {"title": "Lines", "type": "array", "items": line, "minItems": 2, "maxItems": 3}
    none = {"title": "Year", "anyOf": [{"type": "null"}]}
    path = {"type": "string", "format": "path", "maxLength": 3}  # pydantic's for a Path: a note, not a restriction
    for plain, kind in ((referring, bool), (lines, list), (none, type(None)), ({"enum": ["stone"]}, str), (path, str)):
        assert isinstance(llm.with_structured_output(plain).invoke("The tower?"), kind)
    date.fromisoformat(llm.with_structured_output({"type": "string", "format": "date"}).invoke("The tower?"))


def test_the_raw_message_and_what_went_wrong(llm: ChatCompressedContext) -> None:
    good = llm.with_structured_output(Tower, include_raw=True).invoke("The tower?")
    assert good["parsed"] == Tower.model_validate_json(good["raw"].content) and good["parsing_error"] is None
    short = llm.model_copy(update={"max_tokens": 3})
    bad = short.with_structured_output(Tower, include_raw=True).invoke("The tower?")
    assert bad["parsed"] is None and "max_tokens" in str(bad["parsing_error"])
    with pytest.raises(OutputParserException, match="max_tokens"):
        short.with_structured_output(TowerDict).invoke("The tower?")


def test_an_agent_with_a_response_format_and_no_tools(llm: ChatCompressedContext) -> None:
    agent = create_agent(llm, tools=[], response_format=Tower)
    answer = agent.invoke({"messages": [{"role": "user", "content": "The tower?"}]})
    assert isinstance(answer["structured_response"], Tower)


def test_what_cannot_be_enforced_is_refused(llm: ChatCompressedContext) -> None:
    with pytest.raises(ConfigError, match="json_schema.*5"):
        Sampling(json_schema=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="response_format="):
        llm.invoke("hi", response_format={"type": "xml"})
    with pytest.raises(ConfigError, match="objekt"):
        llm.with_structured_output({"title": "Tower", "type": "objekt"}).invoke("hi")
    with pytest.raises(ConfigError, match="'tools'"):
        llm.with_structured_output(Tower, tools=[])


def test_without_the_extra_the_message_names_it(llm: ChatCompressedContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"ctx-compress-rag\[json\]"):
        llm.with_structured_output(Tower).invoke("The tower?")
    assert llm.invoke("The tower?").content


ASKED = PromptTemplate("Describe the tower.")


async def test_llama_index_structured_predict(llama: CompressedContextLLM) -> None:
    wanted = llama.structured_predict(Tower, ASKED)
    assert isinstance(wanted, Tower) and await llama.astructured_predict(Tower, ASKED) == wanted
    assert isinstance(llama.structured_predict(Tower, ASKED, {"temperature": 3.0, "seed": 1}), Tower)
    assert list(llama.stream_structured_predict(Tower, ASKED))[-1] == wanted
    assert [part async for part in await llama.astream_structured_predict(Tower, ASKED)][-1] == wanted
    chat = [ChatMessage("Describe the tower.")]
    assert isinstance(list(llama.as_structured_llm(Tower).stream_chat(chat))[-1].raw, Tower)
    parsed = PromptTemplate("Describe {what}.", output_parser=PydanticOutputParser(Tower))
    Tower.model_validate_json(llama.predict(parsed, what="the tower"))


async def test_cut_json_names_the_limit(llama: CompressedContextLLM) -> None:
    llama.max_tokens = 3
    with pytest.raises(ConfigError, match="max_tokens=3 cut the JSON"):
        await llama.astructured_predict(Tower, ASKED)
    with pytest.raises(ConfigError, match="max_tokens=3 cut the JSON"):
        list(llama.stream_structured_predict(Tower, ASKED))


@pytest.fixture(scope="module")
def index(talkative: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[llama_index.App]:
    app = llama_index.App(talkative, tmp_path_factory.mktemp("index"))
    with app.counting():
        yield app


def tools(index: llama_index.App) -> list[QueryEngineTool]:
    names = ["facts", 'a "summary" {of} all']
    return [QueryEngineTool.from_defaults(index.engine(), name=name, description=name) for name in names]


@pytest.mark.slow
async def test_llama_index_engines_that_read_json(index: llama_index.App) -> None:
    """An engine's `output_cls`; a router that asks one engine or several; a question taken apart."""
    llm = index.llm(max_tokens=300)
    typed = index.index.as_query_engine(
        llm=index.llm(max_tokens=120), output_cls=Tower, node_postprocessors=[index.postprocessor()]
    )
    assert isinstance(typed.query(QUESTION).response, Tower)
    router = RouterQueryEngine.from_defaults(tools(index), llm=llm)
    for response in (router.query(QUESTION), await router.aquery(QUESTION)):
        assert response.metadata["selector_result"].ind in (0, 1)
    for most in (None, 1):
        selector = LLMMultiSelector.from_defaults(llm, max_outputs=most)
        several = RouterQueryEngine.from_defaults(tools(index), llm=index.llm(), selector=selector)
        chosen = several.query(QUESTION).metadata["selector_result"].inds
        assert 1 <= len(chosen) <= (most or 2) and set(chosen) <= {0, 1}
    asked = LLMQuestionGenerator.from_defaults(
        index.llm(max_tokens=700), "Tools: {tools_str}\nQuestion: {query_str}\nSub-questions as JSON:"
    )  # LlamaIndex's own prompt takes more than this decoder's window
    apart = SubQuestionQueryEngine.from_defaults(
        tools(index), question_gen=asked, llm=index.llm(), use_async=False, verbose=False
    )
    response = apart.query(QUESTION)
    assert response.response
    assert any("Sub question: " in node.text for node in response.source_nodes)
