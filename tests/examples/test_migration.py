"""The examples of examples/migration/README.md, on one world, and that the page shows their code."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from migration.app import App, answering, make_app, measure

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


@pytest.mark.parametrize(("name", "diff"), DIFFS)
def test_the_page_shows_the_code(name: str, diff: str) -> None:
    source = Path(str(import_module(f"migration.{name}").__file__)).read_text(encoding="utf-8")
    plain = re.sub(r"\s+", "", source)
    for line in diff.splitlines():
        assert re.sub(r"\s+", "", line[1:]) in plain, line
