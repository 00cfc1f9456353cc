"""Answers of a given form, from a decoder with random weights: it would never write JSON by itself."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any, Literal, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import OutputParserException
from langchain_core.load import dumpd
from langchain_core.output_parsers import StrOutputParser
from llama_index.core import Settings, SummaryIndex
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode

from ctx_compress_rag import TransformersDecoder
from ctx_compress_rag.decoding.generation import Sampling
from ctx_compress_rag.errors import ConfigError, MissingExtraError
from helpers.langchain import CHAT, App, Tower
from langchain_ctx_compress import ChatCompressedContext, CompressedContextPostprocessor
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor as LlamaPostprocessor


class TowerDict(TypedDict):
    built: int
    material: Literal["stone", "wood"]


@pytest.fixture
def llm(app: App) -> ChatCompressedContext:
    return app.llm(max_tokens=120)


def test_a_pydantic_class_a_typed_dict_and_a_schema(llm: ChatCompressedContext) -> None:
    assert isinstance(llm.with_structured_output(Tower).invoke("The tower?"), Tower)
    Tower.model_validate(llm.with_structured_output(Tower.model_json_schema()).invoke("The tower?"))
    said = llm.with_structured_output(TowerDict).invoke("The tower?")
    assert isinstance(said, dict) and set(said) == {"built", "material"} and isinstance(said["built"], int)


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"title": "Years", "type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, list),
        ({"title": "Year", "type": "string", "maxLength": 3}, str),
        ({"title": "Year", "$ref": "#/$defs/year", "$defs": {"year": {"type": "boolean"}}}, bool),
        ({"title": "Year", "anyOf": [{"type": "null"}]}, type(None)),
        ({"enum": ["stone", "wood"]}, str),
        ({"type": "object", "properties": {"built": {"type": "boolean"}}, "required": ["built"]}, dict),
    ],
)
def test_a_schema_of_any_root_is_enforced(llm: ChatCompressedContext, schema: dict[str, Any], kind: type) -> None:
    assert isinstance(llm.with_structured_output(schema).invoke("The tower?"), kind)


def test_a_tool_is_taken_as_its_parameters(llm: ChatCompressedContext) -> None:
    function = {"name": "Tower", "description": "A tower.", "parameters": Tower.model_json_schema()}
    for tool in (function, {"type": "function", "function": function}):
        Tower.model_validate(llm.with_structured_output(tool).invoke("The tower?"))


async def test_in_a_chain_over_markers_sampled_streamed_and_async(app: App, llm: ChatCompressedContext) -> None:
    marker = app.store.markers(["tower"], 8)[0]
    warm = llm.model_copy(update={"temperature": 2.0, "seed": 1})
    chain = CHAT | warm.with_structured_output(Tower, method="json_schema", strict=True)
    given = {"context": marker, "input": "What is the tower made of?"}
    assert isinstance(chain.invoke(given), Tower)
    assert isinstance(await chain.ainvoke(given), Tower)
    assert [type(piece) for piece in chain.stream(given)] == [Tower]


def test_the_raw_message_and_what_went_wrong(llm: ChatCompressedContext) -> None:
    good = llm.with_structured_output(Tower, include_raw=True).invoke("The tower?")
    assert good["parsed"] == Tower.model_validate_json(good["raw"].content) and good["parsing_error"] is None
    short = llm.model_copy(update={"max_tokens": 3}).with_structured_output(Tower, include_raw=True)
    bad = short.invoke("The tower?")
    assert bad["parsed"] is None and "cut at max_tokens" in str(bad["parsing_error"])
    with pytest.raises(OutputParserException, match="cut at max_tokens"):
        llm.model_copy(update={"max_tokens": 3}).with_structured_output(TowerDict).invoke("The tower?")


def test_an_agent_with_a_response_format_and_no_tools(llm: ChatCompressedContext) -> None:
    agent = create_agent(llm, tools=[], response_format=Tower)
    answer = agent.invoke({"messages": [{"role": "user", "content": "The tower?"}]})
    assert isinstance(answer["structured_response"], Tower)


def test_no_tools_to_bind_is_no_error(llm: ChatCompressedContext) -> None:
    bound = llm.bind_tools([], tool_choice="auto", strict=True, max_tokens=2)
    assert bound.invoke("Hello").content == llm.invoke("Hello", max_tokens=2).content
    with pytest.raises(NotImplementedError, match="calls no tools"):
        llm.bind_tools([Tower])


def test_rows_of_a_batch_are_constrained_each(app: App) -> None:
    decoder = TransformersDecoder(app.bundle, app.store)
    sampling = Sampling(120, 1.5, seed=3, json_schema=Tower.model_json_schema())  # type: ignore[arg-type]
    prompts = [[{"role": "user", "content": text}] for text in ("One?", "Of what is the other tower made?", "Third?")]
    together = decoder.generate(prompts, sampling)
    for prompt, answer in zip(prompts, together, strict=True):
        Tower.model_validate_json(answer.text)
        assert answer.finish_reason == "stop"
        assert decoder.generate([prompt], sampling)[0].text == answer.text


def test_what_cannot_be_enforced_is_refused(app: App, llm: ChatCompressedContext) -> None:
    decoder = TransformersDecoder(app.bundle)
    for schema in ({"type": "no such type"}, "not json", {"type": "string", "not": {"const": "a"}, "minLength": "x"}):
        with pytest.raises(ConfigError, match="json_schema="):
            decoder.generate(["hi"], Sampling(json_schema=schema))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="json_schema=5"):
        Sampling(json_schema=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="response_format="):
        llm.invoke("hi", response_format={"type": "json_object"})
    with pytest.raises(ConfigError, match="Invalid type: objekt"):
        llm.with_structured_output({"title": "Tower", "type": "objekt"}).invoke("hi")
    with pytest.raises(ConfigError, match="no option 'tools'"):
        llm.with_structured_output(Tower, tools=[])


def test_without_the_extra_the_message_names_it(llm: ChatCompressedContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"ctx-compress-rag\[serve\]"):
        llm.with_structured_output(Tower).invoke("The tower?")
    assert llm.invoke("The tower?").content


@pytest.fixture
def llama(app: App) -> CompressedContextLLM:
    return CompressedContextLLM(store=app.store, max_tokens=120)


async def test_llama_index_structured_predict(llama: CompressedContextLLM) -> None:
    prompt = PromptTemplate("Describe {what}.")
    assert isinstance(llama.structured_predict(Tower, prompt, what="the tower"), Tower)
    assert isinstance(await llama.astructured_predict(Tower, prompt, what="the tower"), Tower)
    hot = llama.structured_predict(Tower, prompt, {"temperature": 3.0, "seed": 1}, what="the tower")
    assert isinstance(hot, Tower)


def test_llama_index_output_cls_of_an_engine(app: App, llama: CompressedContextLLM) -> None:
    Settings.llm = MockLLM()
    try:
        index = SummaryIndex([TextNode(text="The tower of Brindle is of stone.")])
        engine = index.as_query_engine(
            llm=llama, output_cls=Tower, node_postprocessors=[LlamaPostprocessor(app.store, ratio=4)]
        )
        assert isinstance(engine.query("Of what is the tower?").response, Tower)
        assert isinstance(llama.as_structured_llm(Tower).complete("The tower?").raw, Tower)
    finally:
        Settings._llm = None


# What holds a model of this process


def test_a_deep_copy_shares_the_model(app: App, llm: ChatCompressedContext, llama: CompressedContextLLM) -> None:
    for thing in (llm, llama, app.postprocessor(ratio=8), LlamaPostprocessor(app.store)):
        twin = copy.deepcopy(thing)
        assert twin is not thing and twin.store is thing.store
    assert copy.deepcopy(llm).invoke("Hello").content == llm.invoke("Hello").content
    assert copy.deepcopy(llama).complete("Hello").text == llama.complete("Hello").text
    assert copy.copy(llama).complete("Hello").text == llama.complete("Hello").text
    chain = copy.deepcopy(CHAT | llm | StrOutputParser())
    assert chain.invoke({"context": "A town.", "input": "Hello"})


def test_pickles_are_refused_and_leave_the_object_whole(
    app: App, llm: ChatCompressedContext, llama: CompressedContextLLM
) -> None:
    """LlamaIndex's own pickling would take the store out of the object at hand."""
    langchain = [llm, CompressedContextPostprocessor(store=app.store)]
    for thing in (*langchain, llama, LlamaPostprocessor(app.store)):
        with pytest.raises(ConfigError, match="of this process: create it in the other process"):
            pickle.dumps(thing)
        assert thing.store is app.store
    assert all(dumpd(thing)["type"] == "not_implemented" for thing in langchain)
    assert llm.invoke("Hello").content and llama.complete("Hello").text
