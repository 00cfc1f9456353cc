"""`token_budget` of the postprocessors, counted by the LLM itself."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document

from ctx_compress_rag import SoftContextStore
from ctx_compress_rag.errors import RatioError
from helpers.frameworks import FRAMEWORKS, LangChain
from helpers.langchain import CHAT, SOURCES, TEXTS, App, joined

NAMES = list(TEXTS)


def scored(framework: Any, order: Any, values: list[float | None], score_key: str = "relevance_score") -> list[Any]:
    found = [framework.found(TEXTS[NAMES[i]], NAMES[i]) for i in order]
    for each, value in zip(found, values, strict=True):
        if framework is LangChain and value is not None:
            each.metadata[score_key] = value
        elif framework is not LangChain:
            each.score = value
    return found


@FRAMEWORKS
def test_a_budget_may_return_a_marked_passage_to_its_text(app: App, framework: Any) -> None:
    found = scored(framework, range(4), [None] * 4)
    marked = framework.mark(found, store=app.store, ratio=8)
    assert framework.mark(marked, store=app.store, token_budget=10_000) == found


@pytest.mark.parametrize("budget", [12, 40, 90])
def test_the_prompt_grows_by_no_more_than_the_budget(app: App, budget: int) -> None:
    """By the usage that the LLM reports: context in, less the same prompt without any."""
    llm = app.llm(max_tokens=1)
    documents = app.postprocessor(token_budget=budget).invoke(SOURCES[:3])
    used, empty = (
        llm.invoke(CHAT.invoke({"context": context, "input": "Who?"})).usage_metadata["input_tokens"]
        for context in (joined(documents), "")
    )
    grown = used - empty - 2 * llm.get_num_tokens("\n\n")
    assert 0.9 * sum(llm.get_num_tokens(document.page_content) for document in documents) <= grown <= budget


@FRAMEWORKS
def test_the_best_by_score_stays_text(app: App, framework: Any) -> None:
    best = max(range(4), key=lambda i: len(TEXTS[NAMES[i]]))
    count = app.llm().get_num_tokens
    budget = count(TEXTS[NAMES[best]]) + 12
    rest = [i for i in range(4) if i != best]
    cases = [(range(4), [0.9 if i == best else 0.1 * i for i in range(4)], {})]
    # Without scores the first is the best, as a retriever's list begins with it.
    cases.append(([best, *rest], [None] * 4, {}))
    if framework is LangChain:
        cases.append((*cases[0][:2], {"score_key": "score"}))
    for order, values, options in cases:
        found = scored(framework, order, values, **options)
        marked = framework.mark(found, store=app.store, token_budget=budget, **options)
        shown = [framework.shown(each) for each in marked]
        assert [text == TEXTS[NAMES[i]] for text, i in zip(shown, order, strict=True)] == [i == best for i in order]
        assert sum(map(count, shown)) <= budget
        assert framework.restore(marked, app.store) == found


def test_what_must_stay_text_is_counted(app: App) -> None:
    """What is not stored, what is blank, and a marker that a passage quotes."""
    store = SoftContextStore(app.client, app.bundle, collection="budget")
    store.add(SOURCES[:2], progress=False)
    quoted = store.marker("tower", 4)
    store.add([f"It says {quoted} here."], ["quoting"], progress=False)
    blank = Document(" \n ", id="blank")
    count = app.llm().get_num_tokens
    fixed = count(TEXTS["ferry"]) + count(" \n ")
    options: dict[str, Any] = {"store": store, "on_missing": "text"}
    marked = LangChain.mark([*SOURCES[:3], blank], **options, token_budget=fixed + 9)
    assert marked[2:] == [SOURCES[2], blank]
    assert sum(count(document.page_content) for document in marked) <= fixed + 9
    with pytest.raises(RatioError, match=f"token_budget={fixed + 1}"):
        LangChain.mark([*SOURCES[:3], blank], **options, token_budget=fixed + 1)
    [quoting] = LangChain.mark([Document(store.marker("quoting", 4))], **options, token_budget=120)
    assert quoting.page_content == f"It says {quoted.replace(':', '')} here."
