"""A real vLLM server of the demo bundle, started by the command that `ctx-compress export` prints."""

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.world import BUNDLE
from ctx_compress_rag import Bundle, SoftContextStore
from ctx_compress_rag.decoding.export import export_for_vllm
from helpers.server import free_port

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("vllm")


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    python = os.environ.get(PYTHON)
    if python is None:
        pytest.fail(f"{PYTHON} does not name the Python of an environment with vLLM: run `make test-vllm`")
    folder = tmp_path_factory.mktemp("vllm")
    bundle = Bundle.from_pretrained(BUNDLE)
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
