"""Chains, in every way that LangChain runs one, and every kind of template."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import dynamic_prompt
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from helpers.langchain import CHAT, QUESTION, TEXTS, App, direct, joined, rag
from langchain_ctx_compress import expand_prompt

QUESTIONS = [QUESTION, "When does the ferry leave?"]


@dataclass
class Case:
    """A chain, what it is given for a question, and where the answer is in what it returns."""

    runnable: Any
    given: Callable[[str], Any] = str
    answer: Callable[[Any], str] = str
    piece: Callable[[Any], str] = str
    streamed: dict[str, Any] = field(default_factory=dict)


def retrieval_chain(app: App) -> Case:
    retriever = ContextualCompressionRetriever(
        base_compressor=app.postprocessor(ratio=8), base_retriever=app.retriever()
    )
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(app.llm(), CHAT))
    return Case(
        chain,
        given=lambda question: {"input": question},
        answer=lambda result: result["answer"],
        piece=lambda part: part.get("answer", ""),
    )


def agent(app: App) -> Case:
    context = app.retriever() | app.postprocessor(ratio=8) | joined

    @dynamic_prompt
    def with_context(request: Any) -> str:
        return "Answer from the context.\n\n" + context.invoke(request.state["messages"][-1].text)

    return Case(
        create_agent(app.llm(), tools=[], middleware=[with_context]),
        given=lambda question: {"messages": [HumanMessage(question)]},
        answer=lambda state: state["messages"][-1].text,
        piece=lambda pair: pair[0].text,
        streamed={"stream_mode": "messages"},
    )


CHAINS: dict[str, Callable[[App], Case]] = {
    "pipe": lambda app: Case(rag(app)),
    "pipe, streaming inside": lambda app: Case(rag(app, app.llm(streaming=True))),
    "ContextualCompressionRetriever": retrieval_chain,
    "create_agent": agent,
}


def plainly(app: App, question: str) -> str:
    """The answer to the prompt that a chain is to send, written out by hand."""
    markers = [app.store.marker(document.id, 8) for document in app.retriever().invoke(question)]
    system = "Answer from the context.\n\n" + "\n\n".join(markers)
    return direct(app, [{"role": "system", "content": system}, {"role": "user", "content": question}])


@pytest.mark.parametrize("name", CHAINS)
async def test_every_chain_runs_every_way(app: App, name: str) -> None:
    expected = [plainly(app, question) for question in QUESTIONS]
    assert expected[0] != expected[1]
    case = CHAINS[name](app)
    chain, answer, piece = case.runnable, case.answer, case.piece
    given = [case.given(question) for question in QUESTIONS]
    assert [answer(chain.invoke(each)) for each in given] == expected
    assert [answer(result) for result in chain.batch(given)] == expected
    assert "".join(piece(part) for part in chain.stream(given[0], **case.streamed)) == expected[0]
    assert answer(await chain.ainvoke(given[0])) == expected[0]
    assert [answer(result) for result in await chain.abatch(given)] == expected
    assert "".join([piece(part) async for part in chain.astream(given[0], **case.streamed)]) == expected[0]


@pytest.mark.parametrize(("form", "hole"), [("f-string", "{%s}"), ("jinja2", "{{ %s }}"), ("mustache", "{{%s}}")])
def test_markers_pass_every_template(app: App, form: Any, hole: str) -> None:
    context, question = f"Context: {hole % 'context'}", f"\nQuestion: {hole % 'input'}"
    blocks = [{"type": "text", "text": context}, {"type": "text", "text": question}]
    marker = app.store.marker("tower", 8)
    expected = direct(app, [{"role": "user", "content": f"Context: {marker}\nQuestion: {QUESTION}"}])
    for template in (
        PromptTemplate.from_template(context + question, template_format=form),
        ChatPromptTemplate([("human", context + question)], template_format=form),
        ChatPromptTemplate([("human", blocks)], template_format=form),
    ):
        message = (template | app.llm()).invoke({"context": marker, "input": QUESTION})
        assert (message.text, message.response_metadata["slots"]) == (expected, app.slots("tower", 8))


def test_another_llm_is_sent_the_texts(app: App) -> None:
    tower, mill = app.store.markers(["tower", "mill"], 8)
    fields, plain = {"context": tower, "input": f"{mill}?"}, {"context": TEXTS["tower"], "input": f"{TEXTS['mill']}?"}
    blocks = ChatPromptTemplate(
        [("human", [{"type": "text", "text": "{context}"}, {"type": "text", "text": "{input}"}])]
    )
    for template in (CHAT, PromptTemplate.from_template("{context} {input}"), blocks):
        prompt = template.invoke(fields)
        assert expand_prompt(prompt, app.store) == template.invoke(plain)
        assert prompt == template.invoke(fields)
    assert expand_prompt(f"{tower} {mill}", app.store) == f"{TEXTS['tower']} {TEXTS['mill']}"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    messages = [SystemMessage(tower, id="7"), HumanMessage([{"type": "text", "text": mill}, image])]
    system, human = expand_prompt(messages, app.store)
    assert (system.content, system.id) == (TEXTS["tower"], "7")
    assert human.content == [{"type": "text", "text": TEXTS["mill"]}, image]
    assert expand_prompt(tower, app.store, scope="ben") == tower
    chain = CHAT | partial(expand_prompt, store=app.store) | FakeListChatModel(responses=["ok"])
    assert chain.invoke(fields).content == "ok"
