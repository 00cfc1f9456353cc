"""`ctx-compress serve` as a process of its own: it answers, it compresses, and it stops when told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ctx_compress_rag.cli import main
from ctx_compress_rag.stores.keys import KEY_VARIABLE
from helpers.cli import save_bundle, write_docs
from helpers.serving import WAIT

KEY = "anna-" + "x" * 20
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def index(make_tiny_bundle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_bundle(make_tiny_bundle(), folder / "bundle")
    store = folder / "chroma"
    docs = write_docs(folder / "docs", files=1)
    assert main(["index", str(docs), "--store", str(store), "--bundle", str(folder / "bundle")]) == 0
    return store


@pytest.fixture
def server(index: Path) -> Iterator[tuple[Any, str]]:
    """The process and its address."""
    command = [sys.executable, "-m", "ctx_compress_rag.cli", "serve", "--store", str(index), "--port", "0"]
    limits = ["--max-tokens", "4", "--max-prompt-tokens", "60", "--max-body", "3000"]
    environment = {**os.environ, "CTX_COMPRESS_API_KEYS": f"{KEY} anna", KEY_VARIABLE: "k" * 32}
    with subprocess.Popen([*command, *limits], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"serving 'tiny' at (http://127\.0\.0\.1:\d+/v1)\n", line)
            assert found, line
            yield process, found[1]
        finally:
            process.kill()


def test_the_command_serves_until_it_is_told_to_stop(server: tuple[Any, str], index: Path) -> None:
    process, url = server
    with httpx.Client(timeout=WAIT, headers=HEADERS) as http:
        [item] = http.post(f"{url}/compress", json={"input": "Orla kept bees in Pellmouth.", "ratio": 8}).json()["data"]
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"{item['text']} Who kept bees?"}]}
        reply = http.post(f"{url}/chat/completions", json=body).json()
        assert reply["usage"]["slots"] > 0 and 1 <= reply["usage"]["completion_tokens"] <= 4
        long = http.post(f"{url}/completions", json={"model": "tiny", "prompt": "bees " * 100})
        assert long.status_code == 400 and "60 are allowed here" in long.json()["error"]["message"]
        assert http.post(f"{url}/completions", json={"model": "tiny", "prompt": "bees " * 1000}).status_code == 413
        assert httpx.get(f"{url}/models").status_code == 401
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT) in (0, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "there are no API keys"),
        (["--api-keys", "nowhere"], "cannot read the API keys 'nowhere'"),
        (["--max-body", "0"], "body_bytes=0"),
        (["--collection", "docs"], "give --bundle"),
        (["--port", "1", "--host", "127.0.0.9"], "cannot listen"),
    ],
)
def test_what_cannot_be_served_is_said(
    index: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CTX_COMPRESS_API_KEYS", raising=False)
    if "cannot listen" in message:
        import socket

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            options = ["--port", str(taken.getsockname()[1])]
            assert main(["serve", "--store", str(index), *options]) == 2
    else:
        assert main(["serve", "--store", str(index), *options]) == 2
    assert message in capsys.readouterr().err
