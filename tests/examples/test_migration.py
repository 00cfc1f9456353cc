"""The examples of examples/migration/README.md, on one world, and that the page shows their code."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document

from migration.app import App, answering, compare, make_app, measure
from migration.reranker import Reranker
from migration.text_compression import RATE, TextCompressor

PAGE = (Path(__file__).parents[2] / "examples" / "migration" / "README.md").read_text(encoding="utf-8")
NAMES = ["text_compression", "reranker", "long_context"]
DIFFS = list(zip(NAMES, re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL), strict=True))


@pytest.fixture(scope="module")
def app() -> App:
    return make_app(worlds=1)


@pytest.mark.parametrize("name", NAMES)
def test_after_reads_fewer_tokens_than_the_passages_have(app: App, name: str) -> None:
    module: Any = import_module(f"migration.{name}")
    whole = measure(app, answering(app.retriever(module.K), app.llm))
    before, after = measure(app, module.before(app)), measure(app, module.after(app, 16))
    assert before.prompt_tokens <= whole.prompt_tokens
    assert after.prompt_tokens < whole.prompt_tokens / 4
    assert after.first_token_ms > 0
    assert after.f1 > 0.3  # it reads: without context 0.02 are right


def test_the_printed_table(app: App) -> None:
    calls = []
    chain = answering(app.retriever(1), app.llm)
    rows = compare(app, lambda app: chain, lambda app, ratio: (calls.append(ratio), chain)[1]).splitlines()
    assert calls == [4, 8, 16] and len(rows) == 6
    assert len({row.split("|")[3] for row in rows[2:]}) == 1  # one chain, one number of tokens


def test_what_stands_for_others_does_what_they_do(app: App) -> None:
    tokenizer = app.bundle.tokenizer
    question = next(iter(app.questions))
    found = app.retriever(4).invoke(question)
    kept = TextCompressor(tokenizer=tokenizer, rate=RATE).compress_documents(found, question)
    tokens = [sum(len(tokenizer.tokenize(d.page_content)) for d in documents) for documents in (found, kept)]
    assert 0.5 * RATE < tokens[1] / tokens[0] <= RATE
    odd = [Document(page_content="It rains."), found[0], Document(page_content="A goat sleeps.")]
    assert Reranker(top_n=1).compress_documents(odd, question) == [found[0]]


@pytest.mark.parametrize(("name", "diff"), DIFFS)
def test_the_page_shows_the_code(name: str, diff: str) -> None:
    source = Path(str(import_module(f"migration.{name}").__file__)).read_text(encoding="utf-8")
    plain = re.sub(r"\s+", "", source)
    for line in diff.splitlines():
        assert re.sub(r"\s+", "", line[1:]) in plain, line
