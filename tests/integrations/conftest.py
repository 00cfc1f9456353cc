"""The LangChain app that most tests ask; what holds in both frameworks is tested on its store."""

from typing import Any

import pytest

from helpers.langchain import App, open_app


@pytest.fixture(scope="session")
def app(talkative: Any, tmp_path_factory: pytest.TempPathFactory) -> App:
    """Shared by tests that leave its store as it is."""
    return open_app(tmp_path_factory.mktemp("app"), talkative)
