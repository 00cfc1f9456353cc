"""vLLM itself as the engine, started by the command that `ctx-compress export` prints: the answers are those here."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import openai
import pytest
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, Field

from benchmarks.world import BUNDLE
from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.bundle.files import TEACHER
from ctx_compress_rag.decoding.export import export_for_vllm
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.evaluation.answering import question_chat
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.server.app import create_app
from helpers.decoding import marker_beside
from helpers.engines import EngineTests
from helpers.models import draw_lora
from helpers.server import free_port
from helpers.serving import listening
from langchain_ctx_compress import ChatCompressedContext
from llama_index.llms.ctx_compress import CompressedContextLLM

KEY = "vllm-key"
PYTHON = "CTX_COMPRESS_VLLM"
_WAIT = 600


@dataclass
class Server:
    """The server's address, and the bundle it serves, in this process."""

    bundle: Bundle
    url: str

    @property
    def fields(self) -> dict[str, str]:
        """What the LLM classes are told of it."""
        return {"engine": self.url, "api_key": KEY}

    def measured(self, name: str) -> float:
        """One of the numbers that vLLM shows of itself, summed over its models."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{")]
        assert found, f"vLLM has no number {name}"
        return sum(found)


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    python = os.environ.get(PYTHON)
    if python is None:
        pytest.fail(f"{PYTHON} does not name the Python of an environment with vLLM: run `make test-vllm`")
    folder = tmp_path_factory.mktemp("vllm")
    plain = Bundle.from_pretrained(BUNDLE)
    plain.backbone.add_adapter(TEACHER, lambda: lora_config(TuneConfig(rank=2)))
    draw_lora(plain.backbone.model, std=0.02, adapter=TEACHER)
    config = plain.config.model_copy(update={"reader_share": 0.75})
    bundle = Bundle(config, plain.backbone, plain.compressor, plain.reader)
    # The wheel for CPUs is not named `vllm`, and its `vllm` command asks for that name and ends.
    _, _, model, *options = export_for_vllm(bundle, folder / "served")
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    command += ["--host", "127.0.0.1", "--port", str(port), "--api-key", KEY]
    command += ["--enforce-eager", "--max-num-seqs", "16"]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
    log = folder / "server.log"
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + _WAIT
        while not answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(1)
        yield Server(bundle, url)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def store(vllm: Server, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    return SoftContextStore(tmp_path_factory.mktemp("store"), vllm.bundle)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


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
        [id] = store.ensure([PASSAGE])
        beside = f"{PASSAGE} {marker_beside(store, id, 8, len(PASSAGE))}\n\n{QUESTION}"
        return [soft, plain, f"{marker}\n\n{QUESTION}", QUESTION, again, beside]


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
