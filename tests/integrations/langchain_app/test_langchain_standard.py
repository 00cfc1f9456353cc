"""LangChain's own test suites for chat models; they skip what this model cannot do (tools, images, ...)."""

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from ctx_compress_rag import SoftContextStore
from langchain_ctx_compress import ChatCompressedContext


class Model:
    """What both suites need to know."""

    store: SoftContextStore

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _open(cls, talkative: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.store = SoftContextStore(tmp_path_factory.mktemp("standard"), talkative)

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCompressedContext

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"store": self.store}

    @property
    def has_tool_calling(self) -> bool:
        return False  # `bind_tools` is there only to say so

    @property
    def has_structured_output(self) -> bool:
        return False  # its schemas have strings of any length, which random weights never end

    @property
    def supports_model_override(self) -> bool:
        return False  # the model is the store's bundle


class TestUnit(Model, ChatModelUnitTests):
    pass


class TestIntegration(Model, ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"store": self.store, "max_tokens": 24}
