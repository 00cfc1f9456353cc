"""The app on a socket, in a thread of the test's process or as the command in a process of its own; how it is asked."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.server.run import open_server_socket, uvicorn_config
from ctx_compress_rag.store.key import KEY_VARIABLE
from ctx_compress_rag.store.marker import scope as in_scope
from helpers.decoding import WAIT
from helpers.forked import COMMAND, Forked
from helpers.langchain import QUESTION, TEXTS

ANNA, BERT = "anna-" + "x" * 20, "bert-" + "y" * 20
"""Keys of the scopes `anna` and `bert`."""


@contextmanager
def listening(app: Any, loop: str = "auto") -> Iterator[str]:
    """The address of a server that ends with the context."""
    config = uvicorn_config(app)
    config.loop = loop  # "auto" is uvloop where it is installed
    server = uvicorn.Server(config)
    with open_server_socket("127.0.0.1", 0, guarded=True) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            until = time.monotonic() + WAIT
            while not server.started:  # or it would not see that it should end
                assert thread.is_alive() and time.monotonic() < until, "the server did not start"
                time.sleep(0.01)
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


@contextmanager
def serving(index: Path, *options: str) -> Iterator[tuple[Any, str]]:
    """The process of `ctx-compress serve` on an index of the bundle `tiny`, for the key `ANNA`, and its address."""
    given = ["serve", "--index", str(index), "--port", "0", *options]
    env = {"CTX_COMPRESS_API_KEYS": f"{ANNA} anna", KEY_VARIABLE: "k" * 32}
    with Forked(COMMAND, *given, env=env) as process:
        line = process.stdout.readline()
        found = re.fullmatch(r"serving 'tiny' at (http://127\.0\.0\.1:\d+/v1): clients .*\n", line)
        assert found, line
        yield process, found[1]


def client(url: str, key: str = ANNA) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAIT)


def post(url: str, path: str, body: Any = None, key: str = ANNA, **request: Any) -> httpx.Response:
    """A plain request; `content` in place of the body goes as it is, said to be JSON."""
    kind = {"Content-Type": "application/json"} if "content" in request else {}
    request["headers"] = {"Authorization": f"Bearer {key}"} | kind | request.get("headers", {})
    return httpx.post(f"{url}/v1/{path}", json=body, **{"timeout": WAIT, **request})


def marker(store: SoftContextStore, name: str, scope: str = "anna") -> str:
    return store.marker(store.ensure([TEXTS[name]])[0], 8, scope)


def directly(decoder: Decoder, prompt: Any, scope: str = "anna", **sampling: Any) -> Any:
    with in_scope(scope):
        return decoder.generate([prompt], Sampling(**{"max_tokens": 12, **sampling}))[0]


def chat(store: SoftContextStore, name: str = "tower") -> list[Any]:
    return [{"role": "user", "content": f"{marker(store, name)}\n\n{QUESTION}"}]


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
