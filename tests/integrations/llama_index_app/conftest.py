"""The LlamaIndex app that tests ask."""

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.llama_index import App


@pytest.fixture(scope="module")
def app(talkative: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """Shared by a module's tests, which leave its store as it is; LlamaIndex counts and asks with it."""
    app = App(talkative, tmp_path_factory.mktemp("chroma"))
    with app.counting():
        yield app
