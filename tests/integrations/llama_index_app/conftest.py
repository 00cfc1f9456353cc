"""The LlamaIndex app that tests ask, and what LlamaIndex reports of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.llama_index import App, Events, loud_bundle, watched


@pytest.fixture(scope="module")
def app(make_tiny_bundle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """Shared by a module's tests, which leave its store as it is; LlamaIndex counts and asks with it."""
    app = App(loud_bundle(make_tiny_bundle), tmp_path_factory.mktemp("chroma"))
    with app.counting():
        yield app


@pytest.fixture
def events() -> Iterator[Events]:
    with watched() as events:
        yield events
