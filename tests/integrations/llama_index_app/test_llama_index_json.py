"""Engines that read JSON out of an answer, from a decoder with random weights, which writes none by itself."""

from __future__ import annotations

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.selectors import LLMMultiSelector
from llama_index.core.tools import QueryEngineTool

from ctx_compress_rag.errors import ConfigError
from helpers.langchain import Tower
from helpers.llama_index import QUESTION, App

NAMES = ["facts", 'a "summary" {of} all']


def tools(app: App) -> list[QueryEngineTool]:
    return [QueryEngineTool.from_defaults(app.engine("compact"), name=name, description=name) for name in NAMES]


async def test_a_router_asks_one_engine_or_several(app: App) -> None:
    router = RouterQueryEngine.from_defaults(tools(app), llm=app.llm(max_tokens=300))
    for response in (router.query(QUESTION), await router.aquery(QUESTION)):
        assert response.metadata["selector_result"].ind in (0, 1)
    for most in (None, 1):
        selector = LLMMultiSelector.from_defaults(app.llm(max_tokens=300), max_outputs=most)
        router = RouterQueryEngine.from_defaults(tools(app), llm=app.llm(), selector=selector)
        chosen = router.query(QUESTION).metadata["selector_result"].inds
        assert 1 <= len(chosen) <= (most or 2) and set(chosen) <= {0, 1}


async def test_a_question_is_taken_apart(app: App) -> None:
    asked = LLMQuestionGenerator.from_defaults(
        app.llm(max_tokens=700), "Tools: {tools_str}\nQuestion: {query_str}\nSub-questions as JSON:"
    )  # LlamaIndex's own prompt takes more than this decoder's window
    engine = SubQuestionQueryEngine.from_defaults(
        tools(app), question_gen=asked, llm=app.llm(), use_async=False, verbose=False
    )
    for response in (engine.query(QUESTION), await engine.aquery(QUESTION)):
        assert response.response
        assert any("Sub question: " in node.text for node in response.source_nodes)


def test_a_template_with_a_pydantic_parser(app: App) -> None:
    prompt = PromptTemplate("Describe {what}.", output_parser=PydanticOutputParser(Tower))
    Tower.model_validate_json(app.llm(max_tokens=120).predict(prompt, what="the tower"))


async def test_cut_json_names_the_limit(app: App) -> None:
    llm = app.llm(max_tokens=3)
    with pytest.raises(ConfigError, match="max_tokens=3 cut the JSON"):
        llm.structured_predict(Tower, PromptTemplate("Describe the tower."))
    with pytest.raises(ConfigError, match="max_tokens=3 cut the JSON"):
        await llm.astructured_predict(Tower, PromptTemplate("Describe the tower."))
    with pytest.raises(ConfigError, match="max_tokens=3 cut the JSON"):
        list(llm.stream_structured_predict(Tower, PromptTemplate("Describe the tower.")))
    with pytest.raises(ConfigError, match="max_tokens=3 cut the JSON"):
        [_ async for _ in await llm.astream_structured_predict(Tower, PromptTemplate("Describe the tower."))]


async def test_a_streamed_object_is_whole_at_its_end(app: App) -> None:
    llm, asked = app.llm(max_tokens=120), PromptTemplate("Describe the tower.")
    wanted = llm.structured_predict(Tower, asked)
    assert list(llm.stream_structured_predict(Tower, asked))[-1] == wanted
    assert [part async for part in await llm.astream_structured_predict(Tower, asked)][-1] == wanted
    chat = [ChatMessage("Describe the tower.")]
    assert isinstance(list(llm.as_structured_llm(Tower).stream_chat(chat))[-1].raw, Tower)
