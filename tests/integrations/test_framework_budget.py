"""`token_budget` and `text_share` of the postprocessors, counted by the LLM itself."""

from functools import partial
from typing import Any

import pytest
from langchain_core.documents import Document

from ctx_compress_rag import SoftContextStore
from ctx_compress_rag.errors import ConfigError, RatioError
from ctx_compress_rag.marking.budget import nearest_sentences
from helpers.frameworks import FRAMEWORKS, LangChain
from helpers.langchain import QUESTION, SOURCES, TEXTS, App, joined

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
    for options in ({}, {"text_share": 0.5}):
        marked = framework.mark(found, QUESTION, store=app.store, ratio=8, **options)
        left = framework.restore(marked, app.store)
        assert framework.mark(marked, QUESTION, store=app.store, token_budget=10_000) == left


@FRAMEWORKS
def test_a_ratio_buys_sentences_and_slots_of_the_best(app: App, framework: Any) -> None:
    """As many tokens as slots of all passages would take; the rest of the passages leave."""
    count = app.llm().get_num_tokens
    found = scored(framework, range(4), [0.1, 0.2, 0.9, 0.3])
    plain = framework.mark(found, QUESTION, store=app.store, ratio=4)
    size = count("\n\n".join(map(framework.shown, plain)))
    marked = framework.mark(found, QUESTION, store=app.store, ratio=4, text_share=0.5)
    shown = "\n\n".join(map(framework.shown, marked))
    assert size - 6 < count(shown) <= size  # a word may be six tokens of this tokenizer
    assert app.store.markers(["ferry"], 4, beside_text=True)[0] in shown and shown.count("[[ctx:") == 1
    best = max(
        (part.similarity, part.text) for own in nearest_sentences(list(TEXTS.values()), QUESTION) for part in own
    )[1]
    assert best[:20] in shown
    restored = framework.restore(marked, app.store)
    assert restored == [each for each in found if each in restored] and 0 < len(restored) < 4


@FRAMEWORKS
def test_the_bundle_says_what_is_bought_by_default(app: App, framework: Any) -> None:
    found = scored(framework, range(4), [None] * 4)
    plain = framework.mark(found, QUESTION, store=app.store, ratio=8)
    asked = framework.mark(found, QUESTION, store=app.store, ratio=8, text_share=0.5)
    assert [framework.shown(each) for each in plain] == app.store.markers(NAMES, 8)
    config = app.bundle.config
    app.bundle.config = config.model_copy(update={"text_share": 0.5})
    try:
        mark = partial(framework.mark, store=app.store, ratio=8)
        assert mark(found, QUESTION) == asked
        assert mark(found, QUESTION, text_share=0) == mark(found) == plain
        assert mark(found[:1], QUESTION) == plain[:1]
    finally:
        app.bundle.config = config


@FRAMEWORKS
def test_a_share_needs_the_question(app: App, framework: Any) -> None:
    with pytest.raises(ConfigError, match="text_share=0.5 needs the question"):
        framework.mark(scored(framework, range(4), [None] * 4), store=app.store, text_share=0.5)
    for share in (-0.1, 2, "half"):
        with pytest.raises(ConfigError, match="text_share"):
            framework.postprocessor(store=app.store, text_share=share)


def test_the_best_by_score_is_the_first_without_scores(app: App) -> None:
    ask = partial(LangChain.mark, query=QUESTION, store=app.store, token_budget=20, text_share=0.1)
    for options in ({}, {"score_key": "score"}):
        documents = ask(scored(LangChain, range(4), [0.1, 0.4, 0.9, 0.3], **options), **options)
        assert "ferry" in [each.id for each in documents if "[[ctx:" in each.page_content]
    documents = ask(scored(LangChain, range(4), [None] * 4))
    assert NAMES[0] in [each.id for each in documents if "[[ctx:" in each.page_content]


def test_what_must_stay_text_is_counted(app: App) -> None:
    """What is not stored, what is blank, and a marker that a passage quotes."""
    store = SoftContextStore(app.client, app.bundle, collection="budget")
    store.add(SOURCES[:2], progress=False)
    quoted = store.marker("tower", 4)
    store.add([f"It says {quoted} here."], ["quoting"], progress=False)
    blank = Document(" \n ", id="blank")
    count = app.llm().get_num_tokens
    fixed = count(joined([SOURCES[2], blank]))
    options: dict[str, Any] = {"store": store, "on_missing": "text"}
    marked = LangChain.mark([*SOURCES[:3], blank], **options, token_budget=fixed + 20)
    assert marked[2:] == [SOURCES[2], blank]
    assert count(joined(marked)) <= fixed + 20
    with pytest.raises(RatioError, match=f"token_budget={fixed + 1}"):
        LangChain.mark([*SOURCES[:3], blank], **options, token_budget=fixed + 1)
    [quoting] = LangChain.mark([Document(store.marker("quoting", 4))], **options, token_budget=120)
    assert quoting.page_content == f"It says {quoted.replace(':', '')} here."


@FRAMEWORKS
def test_an_llm_quotes_if_its_bundle_answers_best_so(
    app: App, framework: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And JSON, which it writes badly, is short, with a warning."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    config = app.bundle.config
    app.bundle.config = config.model_copy(update={"extractive": True, "name": f"quoting-{framework.__name__}"})
    try:
        llm = framework.llm(store=app.store)
        assert llm.sampling({}).extractive and not llm.sampling({"extractive": False}).extractive
        short = llm.sampling({"response_format": schema})
        assert not short.extractive and short.max_tokens < llm.max_tokens and app.bundle.config.name in caplog.text
        assert llm.sampling({"response_format": schema, "max_tokens": 300}).max_tokens == 300
        for options in ({"extractive": False}, {"engine": "http://localhost:1"}):
            free = framework.llm(store=app.store, **options)
            assert not free.sampling({}).extractive
            assert free.sampling({"response_format": schema}).max_tokens == short.max_tokens
    finally:
        app.bundle.config = config
    assert not framework.llm(store=app.store).sampling({}).extractive
