"""The LangChain classes in real chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import dynamic_prompt
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever
from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline
from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_text_splitters import RecursiveCharacterTextSplitter

from helpers.decoding import prefills
from helpers.langchain import CHAT, QUESTION, App, contains, direct, joined, open_app, rag, rows_of
from langchain_ctx_compress import restore_sources


async def test_compressor_pipeline(talkative: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, talkative, indexed=False)
    splitter = RecursiveCharacterTextSplitter(chunk_size=60, chunk_overlap=0)
    pipeline = DocumentCompressorPipeline(transformers=[splitter, app.postprocessor(ratio=16)])
    retriever = ContextualCompressionRetriever(base_compressor=pipeline, base_retriever=app.retriever())
    marked = retriever.invoke(QUESTION)
    assert len(marked) == len(app.store) >= 4
    assert restore_sources(marked, app.store) == splitter.transform_documents(app.retriever().invoke(QUESTION))
    assert await retriever.ainvoke(QUESTION) == marked


TEMPLATES = {
    "f-string": PromptTemplate.from_template("Context: {context}\nQuestion: {input}"),
    "jinja2": PromptTemplate.from_template("Context: {{ context }}\nQuestion: {{ input }}", template_format="jinja2"),
    "mustache": PromptTemplate.from_template("Context: {{context}}\nQuestion: {{input}}", template_format="mustache"),
    "chat": ChatPromptTemplate([("human", "Context: {context}\nQuestion: {input}")]),
    "chat jinja2": ChatPromptTemplate(
        [("human", "Context: {{ context }}\nQuestion: {{ input }}")], template_format="jinja2"
    ),
    "chat mustache": ChatPromptTemplate(
        [("human", "Context: {{context}}\nQuestion: {{input}}")], template_format="mustache"
    ),
    "text blocks": ChatPromptTemplate(
        [("human", [{"type": "text", "text": "Context: {context}\n"}, {"type": "text", "text": "Question: {input}"}])]
    ),
}


# Every chain, in every way that LangChain runs one


QUESTIONS = [QUESTION, "When does the ferry leave?"]


class Reversed(BaseDocumentTransformer):
    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        return documents[::-1]


@dataclass
class Case:
    """A chain, what it is given for a question, and where the answer is in what it returns."""

    runnable: Any
    given: Callable[[str], Any] = str
    answer: Callable[[Any], str] = str
    piece: Callable[[Any], str] = str
    streamed: dict[str, Any] = field(default_factory=dict)


def compressing(app: App, base: Any, *before: Any) -> Any:
    compressor = app.postprocessor(ratio=8)
    if before:
        compressor = DocumentCompressorPipeline(transformers=[*before, compressor])
    return ContextualCompressionRetriever(base_compressor=compressor, base_retriever=base)


def retrieval_chain(app: App, retriever: Any) -> Case:
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(app.llm(), CHAT))
    return Case(
        chain,
        given=lambda question: {"input": question},
        answer=lambda result: result["answer"],
        piece=lambda part: part.get("answer", ""),
    )


def history_aware(app: App) -> Case:
    """A follow-up question: the history, with a marker of an earlier turn in it, rewrites what is searched for."""
    rewrite = ChatPromptTemplate([MessagesPlaceholder("chat_history"), ("human", "{input}")])
    retriever = create_history_aware_retriever(app.llm(), compressing(app, app.retriever()), rewrite)
    case = retrieval_chain(app, retriever)
    earlier = app.store.marker("ferry", 8)
    history = [HumanMessage(f"{earlier} When does it leave?"), AIMessage("At noon.")]
    case.given = lambda question: {"input": question, "chat_history": history}
    return case


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
    "ContextualCompressionRetriever": lambda app: retrieval_chain(app, compressing(app, app.retriever())),
    "DocumentCompressorPipeline": lambda app: retrieval_chain(app, compressing(app, app.retriever(), Reversed())),
    "EnsembleRetriever": lambda app: retrieval_chain(
        app, compressing(app, EnsembleRetriever(retrievers=[app.retriever(1), app.retriever(2)], weights=[0.5, 0.5]))
    ),
    "EnsembleRetriever of compressed": lambda app: retrieval_chain(
        app, EnsembleRetriever(retrievers=[compressing(app, app.retriever(1)), compressing(app, app.retriever(2))])
    ),
    "create_agent": agent,
}


def plainly(app: App, question: str, *, reverse: bool = False) -> str:
    """The answer to the prompt that the chains are to send, written out by hand."""
    ids = [document.id for document in app.retriever().invoke(question)]
    markers = [app.store.marker(id, 8) for id in (ids[::-1] if reverse else ids)]
    system = "Answer from the context.\n\n" + "\n\n".join(markers)
    return direct(app, [{"role": "system", "content": system}, {"role": "user", "content": question}])


async def assert_same_every_way(case: Case, expected: list[str]) -> None:
    chain, answer, piece = case.runnable, case.answer, case.piece
    given = [case.given(question) for question in QUESTIONS]
    assert [answer(chain.invoke(each)) for each in given] == expected
    assert [answer(result) for result in chain.batch(given)] == expected
    assert "".join(piece(part) for part in chain.stream(given[0], **case.streamed)) == expected[0]
    assert answer(await chain.ainvoke(given[0])) == expected[0]
    assert [answer(result) for result in await chain.abatch(given)] == expected
    assert "".join([piece(part) async for part in chain.astream(given[0], **case.streamed)]) == expected[0]


@pytest.mark.parametrize("name", CHAINS)
async def test_every_chain_runs_every_way(app: App, name: str) -> None:
    expected = [plainly(app, question, reverse=name == "DocumentCompressorPipeline") for question in QUESTIONS]
    assert expected[0] != expected[1]
    await assert_same_every_way(CHAINS[name](app), expected)


async def test_history_aware_chain_runs_every_way(app: App) -> None:
    case = history_aware(app)
    with prefills(app.bundle.backbone.model) as seen:
        results = [case.runnable.invoke(case.given(question)) for question in QUESTIONS]
    rewriting, answering = seen[0], seen[1]
    assert contains(rewriting, rows_of(app, "ferry", 8))  # a marker replayed from the history
    for document in results[0]["context"]:
        assert contains(answering, rows_of(app, document.id, 8))
    await assert_same_every_way(case, [result["answer"] for result in results])


@pytest.mark.parametrize("kind", TEMPLATES)
async def test_every_template_runs_every_way(app: App, kind: str) -> None:
    marker = app.store.marker("tower", 8)
    expected = [
        direct(app, [{"role": "user", "content": f"Context: {marker}\nQuestion: {question}"}]) for question in QUESTIONS
    ]
    case = Case(
        TEMPLATES[kind] | app.llm(),
        given=lambda question: {"context": marker, "input": question},
        answer=lambda message: message.text,
        piece=lambda chunk: chunk.text,
    )
    await assert_same_every_way(case, expected)
    with prefills(app.bundle.backbone.model) as seen:
        message = case.runnable.invoke(case.given(QUESTION))
    assert contains(seen[0], rows_of(app, "tower", 8)) and message.response_metadata["slots"] == app.slots("tower", 8)
