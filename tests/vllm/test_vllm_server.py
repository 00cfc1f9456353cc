"""vLLM itself as the engine: the same answers as in this process, for `serve` and both frameworks, too."""

import asyncio
import time
from typing import Any, Literal

import openai
import pytest
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, Field

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.evaluation.answering import question_chat
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.server.app import create_app
from helpers.engines import EngineTests
from helpers.serving import listening
from langchain_ctx_compress import ChatCompressedContext
from llama_index.llms.ctx_compress import CompressedContextLLM

PASSAGE = "Here are some facts about Nimbridge. Nimbridge elected Orla Reedwen as its mayor."
QUESTION = "Who is the mayor of Nimbridge?"
TOKENS = Sampling(max_tokens=16)


@pytest.fixture(scope="module")
def there(vllm: Any, store: SoftContextStore) -> Decoder:
    return Decoder(vllm.bundle, store, **vllm.fields)


@pytest.fixture(scope="module")
def here(vllm: Any, store: SoftContextStore) -> Decoder:
    return Decoder(vllm.bundle, store)


@pytest.fixture(scope="module")
def soft(vllm: Any, store: SoftContextStore) -> list[dict[str, str]]:
    return question_chat(vllm.bundle.config.template, mark_texts(store, [PASSAGE], ratio=4), QUESTION)


class TestMatrix(EngineTests):
    cannot = frozenset({"sampled", "quotation", "json"})  # its draws and its white space are its own

    @pytest.fixture(scope="class")
    def prompts(self, store: SoftContextStore, soft: list[dict[str, str]]) -> list[Any]:
        plain = [{"role": "user", "content": QUESTION}]
        marker = mark_texts(store, [PASSAGE], ratio=8)[0]
        again = [*soft, {"role": "assistant", "content": "Orla."}, *plain]
        return [soft, plain, f"{marker}\n\n{QUESTION}", QUESTION, again]


def test_a_stream_that_is_left_ends_there_too(vllm: Any, there: Decoder, soft: list[dict[str, str]]) -> None:
    endless = "One two three one two three one two"
    pieces = there.stream(endless, Sampling(max_tokens=1500, temperature=2.0, seed=0))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    until = time.monotonic() + 30
    while vllm.measured("num_requests_running") and time.monotonic() < until:
        time.sleep(0.2)
    assert vllm.measured("num_requests_running") == 0
    assert there.generate([soft], TOKENS)[0].text


class Bridge(BaseModel):
    """What is asked of a passage."""

    builder: str = Field(max_length=20)
    material: Literal["stone", "wood"]
    arches: Literal[1, 2, 3]


async def test_both_frameworks_get_an_answer_of_a_form(vllm: Any, store: SoftContextStore) -> None:
    marker = mark_texts(store, ["The bridge of Velmora is of stone and has two arches."], ratio=4)[0]
    llm = ChatCompressedContext(store=store, max_tokens=60, **vllm.fields).with_structured_output(Bridge)
    llama = CompressedContextLLM(store=store, max_tokens=60, **vllm.fields)
    for asked in ("The bridge?", f"{marker} The bridge?"):
        answers = [llm.invoke(asked), await llm.ainvoke(asked)]
        answers.append(await llama.astructured_predict(Bridge, PromptTemplate("{asked}"), asked=asked))
        assert all(isinstance(answer, Bridge) for answer in answers)


async def test_serve_in_front_of_vllm(there: Decoder, here: Decoder, soft: list[dict[str, str]]) -> None:
    expected = here.generate([soft], TOKENS)[0]
    with listening(create_app(there)) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120) as client:
            asked: Any = {"model": "demo", "messages": soft, "max_tokens": 16}
            whole = await client.chat.completions.create(**asked)
            assert whole.choices[0].message.content == expected.text
            assert whole.usage and whole.usage.completion_tokens == expected.completion_tokens
            many = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(32)))
            assert {each.choices[0].message.content for each in many} == {expected.text}
