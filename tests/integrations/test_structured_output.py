"""Answers of a given form, from a decoder with random weights: it would never write JSON by itself."""

import sys
from collections.abc import Iterator
from typing import Any, Literal, TypedDict

import pydantic.v1
import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import OutputParserException
from llama_index.core.llms import ChatMessage
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.selectors import LLMMultiSelector
from llama_index.core.tools import QueryEngineTool

from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, MissingExtraError
from helpers import llama_index
from helpers.langchain import CHAT, QUESTION, App, Tower
from langchain_ctx_compress import ChatCompressedContext
from llama_index.llms.ctx_compress import CompressedContextLLM


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
    for plain, kind in ((referring, bool), (lines, list), (none, type(None)), ({"enum": ["stone"]}, str)):
        assert isinstance(llm.with_structured_output(plain).invoke("The tower?"), kind)


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
    with pytest.raises(MissingExtraError, match=r"ctx-compress-rag\[serve\]"):
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
    for response in (apart.query(QUESTION), await apart.aquery(QUESTION)):
        assert response.response
        assert any("Sub question: " in node.text for node in response.source_nodes)
