"""LangChain's own test suites for chat models, and answers of a form, with vLLM."""

from typing import Any, Literal

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from pydantic import BaseModel, Field

from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.store import SoftContextStore
from integrations.langchain_app.test_langchain_standard import Model
from langchain_ctx_compress import ChatCompressedContext


class _There(Model):
    fields: dict[str, str]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _open(cls, vllm: Any, store: SoftContextStore) -> None:
        cls.store, cls.fields = store, vllm.fields

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"store": self.store, **self.fields}


class TestUnit(_There, ChatModelUnitTests):
    pass


class TestIntegration(_There, ChatModelIntegrationTests):
    pass


class Bridge(BaseModel):
    """What is asked of a passage."""

    builder: str = Field(max_length=20)
    material: Literal["stone", "wood"]
    arches: Literal[1, 2, 3]


async def test_answers_of_a_form(vllm: Any, store: SoftContextStore) -> None:
    llm = ChatCompressedContext(store=store, max_tokens=60, **vllm.fields).with_structured_output(Bridge)
    marker = mark_texts(store, ["The bridge of Velmora is of stone and has two arches."], ratio=4)[0]
    for asked in ("The bridge?", f"{marker} The bridge?"):
        for answer in (llm.invoke(asked), await llm.ainvoke(asked)):
            assert isinstance(answer, Bridge)
