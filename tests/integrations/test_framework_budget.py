"""`token_budget` of the postprocessors, counted by the LLM itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document

from ctx_compress_rag import SoftContextStore
from ctx_compress_rag.errors import RatioError
from ctx_compress_rag.store.marker import Marker
from helpers.budget import usages
from helpers.frameworks import FRAMEWORKS, LangChain
from helpers.langchain import CHAT, SOURCES, TEXTS, App, joined
from langchain_ctx_compress import restore_sources

NAMES = list(TEXTS)
scores = st.none() | st.floats(-5, 5) | st.sampled_from([0.25, 0.5])


def scored(framework: Any, values: list[float | None]) -> list[Any]:
    found = [framework.found(text, name) for name, text in TEXTS.items()]
    for each, value in zip(found, values, strict=True):
        if framework is LangChain and value is not None:
            each.metadata["relevance_score"] = value
        elif framework is not LangChain:
            each.score = value
    return found


def ratio(app: App, shown: str) -> int:
    """Base slots merged into one; 0 for text, and the passage's own number where one slot is left."""
    [part] = app.store.split(shown)
    return part.factor if isinstance(part, Marker) else 0


@FRAMEWORKS
def test_never_over_monotone_and_well_used(app: App, framework: Any) -> None:
    count = app.llm().get_num_tokens
    tokens = [count(text) for text in TEXTS.values()]
    slots = [app.slots(name, 4) for name in NAMES]
    levels = list(range(max(slots) + 1))

    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(scores, min_size=4, max_size=4), st.integers(4, sum(tokens) + 10))
    def check(values: list[float | None], budget: int) -> None:
        marked = framework.mark(scored(framework, values), store=app.store, token_budget=budget)
        shown = [framework.shown(each) for each in marked]
        spent = sum(map(count, shown))
        assert spent <= budget
        known = [-9.0 if value is None else value for value in values]
        order = sorted(range(4), key=lambda i: -known[i])
        possible = usages([tokens[i] for i in order], [slots[i] for i in order], levels, budget)
        assert spent in possible and (spent >= 0.9 * budget or spent == max(possible))
        for i in range(4):
            for j in range(4):
                if known[i] > known[j] and ratio(app, shown[j]) < app.slots(NAMES[j], 4):
                    assert ratio(app, shown[i]) <= ratio(app, shown[j])

    check()


@FRAMEWORKS
def test_a_budget_may_return_a_marked_passage_to_its_text(app: App, framework: Any) -> None:
    found = scored(framework, [None] * 4)
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


def test_the_best_by_score_stays_text(app: App) -> None:
    best = max(range(4), key=lambda i: len(TEXTS[NAMES[i]]))
    budget = app.llm().get_num_tokens(TEXTS[NAMES[best]]) + 12
    for key in ("relevance_score", "score"):
        documents = [Document(d.page_content, id=d.id, metadata={key: 0.1 * i}) for i, d in enumerate(SOURCES)]
        documents[best].metadata[key] = 0.9
        marked = app.postprocessor(token_budget=budget, score_key=key).invoke(documents)
        assert [i for i, document in enumerate(marked) if document == documents[i]] == [best]
        assert restore_sources(marked, app.store) == documents
    # Without scores the first is the best, as a retriever's list begins with it.
    rearranged = [SOURCES[best], *(SOURCES[i] for i in range(4) if i != best)]
    marked = app.postprocessor(token_budget=budget).invoke(rearranged)
    assert [ratio(app, document.page_content) == 0 for document in marked] == [True, False, False, False]


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
