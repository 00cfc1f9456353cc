"""The LangChain postprocessor in a chain, and the texts again: for citations, and for other LLMs."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda

from ctx_compress_rag.errors import ConfigError
from helpers.langchain import CHAT, QUESTION, SOURCES, TEXTS, App
from langchain_ctx_compress import expand_prompt, restore_sources


@pytest.mark.parametrize("given", [QUESTION, [QUESTION], SOURCES[0], {"context": SOURCES}])
def test_what_is_no_list_of_documents_is_refused(app: App, given: Any) -> None:
    """A step before the retriever, a chain's whole state, one document alone."""
    for call in (app.postprocessor().invoke, partial(restore_sources, store=app.store)):
        with pytest.raises(ConfigError, match=r"got (str|Document|dict): .*after a retriever"):
            call(given)


def test_import_without_langchain_names_the_extra() -> None:
    code = "import sys; sys.modules['langchain_core'] = None; import langchain_ctx_compress"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install 'ctx-compress-rag[langchain]'" in done.stderr


def test_sources_of_an_answer_keep_texts_metadata_scores_and_ids(app: App) -> None:
    """After a chain's answer, as citations need them: exactly what the retriever had found."""

    def found(question: str) -> list[Document]:
        documents = app.retriever(k=3).invoke(question)
        for rank, document in enumerate(documents):
            document.metadata |= {"relevance_score": 0.9 - rank / 8, "pages": [rank, {"of": "book"}]}
        return documents

    for options in ({"ratio": 8}, {"token_budget": 70}):
        compressed = RunnableLambda(found) | app.postprocessor(**options)
        chain = create_retrieval_chain(
            RunnableLambda(lambda given: given["input"]) | compressed, create_stuff_documents_chain(app.llm(), CHAT)
        )
        result = chain.invoke({"input": QUESTION})
        assert result["answer"] and result["context"] != found(QUESTION)
        assert restore_sources(result["context"], app.store) == found(QUESTION)


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
