"""`token_budget` of the LangChain postprocessor, counted by the LLM itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document

from ctx_compress_rag import RatioError
from ctx_compress_rag.store.marker import Marker
from helpers.budget import usages
from helpers.langchain import CHAT, QUESTION, SOURCES, TEXTS, App, direct, joined, open_app
from langchain_ctx_compress import restore_sources

NAMES = list(TEXTS)
scores = st.none() | st.floats(-5, 5) | st.sampled_from([0.25, 0.5])


def scored(values: list[float | None], key: str = "relevance_score") -> list[Document]:
    documents = [document.model_copy(deep=True) for document in SOURCES]
    for document, value in zip(documents, values, strict=True):
        if value is not None:
            document.metadata[key] = value
    return documents


def ratio(app: App, document: Document) -> int:
    """Base slots merged into one; 0 for text, and the passage's own number where one slot is left."""
    [part] = app.store.split(document.page_content)
    return part.factor if isinstance(part, Marker) else 0


def test_never_over_monotone_and_well_used(app: App) -> None:
    llm = app.llm()
    tokens = [llm.get_num_tokens(text) for text in TEXTS.values()]
    slots = [app.slots(name, 4) for name in NAMES]
    levels = list(range(max(slots) + 1))

    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(scores, min_size=4, max_size=4), st.integers(4, sum(tokens) + 10))
    def check(values: list[float | None], budget: int) -> None:
        marked = app.postprocessor(token_budget=budget).invoke(scored(values))
        spent = sum(llm.get_num_tokens(document.page_content) for document in marked)
        assert spent <= budget
        known = [-9.0 if value is None else value for value in values]
        order = sorted(range(4), key=lambda i: -known[i])
        possible = usages([tokens[i] for i in order], [slots[i] for i in order], levels, budget)
        assert spent in possible and (spent >= 0.9 * budget or spent == max(possible))
        for i, one in enumerate(marked):
            for j, other in enumerate(marked):
                if known[i] > known[j] and ratio(app, other) < app.slots(NAMES[j], 4):
                    assert ratio(app, one) <= ratio(app, other)

    check()


@pytest.mark.parametrize("budget", [12, 40, 90])
def test_the_prompt_grows_by_no_more_than_the_budget(app: App, budget: int) -> None:
    """In a chain, by the usage that the LLM reports: context in, less the same prompt without any."""
    retriever = ContextualCompressionRetriever(
        base_compressor=app.postprocessor(token_budget=budget), base_retriever=app.retriever(k=3)
    )
    llm = app.llm()
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, CHAT))
    result = chain.invoke({"input": QUESTION})
    documents = result["context"]
    prompt = CHAT.invoke({"context": joined(documents), "input": QUESTION})
    used = llm.invoke(prompt).usage_metadata["input_tokens"]
    empty = llm.invoke(CHAT.invoke({"context": "", "input": QUESTION})).usage_metadata["input_tokens"]
    separators = 2 * llm.get_num_tokens("\n\n")
    assert used - empty - separators <= budget
    assert used - empty - separators >= 0.9 * sum(llm.get_num_tokens(d.page_content) for d in documents)
    chat = [{"role": role, "content": m.content} for role, m in zip(("system", "user"), prompt.messages, strict=True)]
    assert result["answer"] == direct(app, chat)


def test_the_best_by_score_stays_text(app: App) -> None:
    best = max(range(4), key=lambda i: len(TEXTS[NAMES[i]]))
    budget = app.llm().get_num_tokens(TEXTS[NAMES[best]]) + 12
    for key in ("relevance_score", "score"):
        documents = scored([0.9 if i == best else 0.1 * i for i in range(4)], key)
        marked = app.postprocessor(token_budget=budget, score_key=key).invoke(documents)
        assert [i for i, document in enumerate(marked) if document == documents[i]] == [best]
        assert restore_sources(marked, app.store) == documents
    # Without scores the first is the best, as a retriever's list begins with it.
    rearranged = [SOURCES[best], *(SOURCES[i] for i in range(4) if i != best)]
    marked = app.postprocessor(token_budget=budget).invoke(rearranged)
    assert [ratio(app, document) == 0 for document in marked] == [True, False, False, False]


def test_what_must_stay_text_is_counted(talkative: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, talkative, indexed=False)
    app.store.add(SOURCES[:2], progress=False)
    llm = app.llm()
    documents = [*SOURCES[:3], Document(id="blank", page_content=" \n ")]
    fixed = llm.get_num_tokens(TEXTS["ferry"]) + llm.get_num_tokens(" \n ")
    marked = app.postprocessor(token_budget=fixed + 9, on_missing="text").invoke(documents)
    assert marked[2:] == documents[2:]
    assert sum(llm.get_num_tokens(document.page_content) for document in marked) <= fixed + 9
    with pytest.raises(RatioError, match=f"4 passages do not fit into token_budget={fixed + 1}"):
        app.postprocessor(token_budget=fixed + 1, on_missing="text").invoke(documents)


def test_a_marker_that_a_passage_quotes_is_text(talkative: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path, talkative)
    llm = app.llm()
    quoted = app.store.marker("tower", 4)
    app.store.add([f"It says {quoted} here."], ["quoting"], progress=False)
    documents = [Document(page_content=app.store.marker("quoting", 4)), SOURCES[2]]
    for budget in range(60, 120, 15):
        marked = app.postprocessor(token_budget=budget, on_missing="text").invoke(documents)
        assert sum(llm.get_num_tokens(document.page_content) for document in marked) <= budget
    assert marked[0].page_content == f"It says {quoted.replace(':', '')} here."
    assert llm.invoke(marked[0].page_content).response_metadata["slots"] == 0
