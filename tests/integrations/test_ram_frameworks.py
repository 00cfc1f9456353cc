"""Close reading in both frameworks; from a question to its answer: tests/methods/test_methods.py."""

from __future__ import annotations

from typing import Any

import pytest

from ctx_compress_rag.errors import ConfigError, RatioError
from ctx_compress_rag.store import SoftContextStore
from helpers.frameworks import FRAMEWORKS
from helpers.ram import PASSAGES, QUESTION, ask, close_bundle, close_store


@pytest.fixture(scope="module")
def store(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    return close_store(tmp_path_factory.mktemp("ram"), close_bundle(tiny_tokenizer))


@FRAMEWORKS
def test_a_question_decides_what_stays_text(store: SoftContextStore, framework: Any) -> None:
    found = [framework.found(text, n=n) for n, text in enumerate(PASSAGES)]
    for options, ratio in (({"ratio": 4}, 4), ({}, 2)):
        marked = framework.mark(found, QUESTION, store=store, **options)
        assert [framework.shown(each) for each in marked] == ask(store, ratio=ratio)
        assert framework.restore(marked, store) == found


@FRAMEWORKS
def test_a_step_without_a_question_says_how_to_give_it(store: SoftContextStore, framework: Any) -> None:
    found = [framework.found(text) for text in PASSAGES]
    with pytest.raises(ConfigError, match="ContextualCompressionRetriever.*query_bundle or query_str"):
        framework.mark(found, store=store)
    for options, error in (({"token_budget": 9}, ConfigError), ({"ratio": 1}, RatioError)):
        with pytest.raises(error, match="ram bundle"):
            framework.postprocessor(store=store, **options)
