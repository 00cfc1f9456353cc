"""What the server refuses: other tenants' markers, requests that it does not serve, and what strangers may cost it."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.errors import ConfigError, DecoderMemoryError, ServerError, StoreWriteError
from ctx_compress_rag.server.app import create_app
from ctx_compress_rag.server.guard import (
    KEYS_VARIABLE,
    ApiKeys,
    RequestGuard,
    ServerLimits,
    ServerMetrics,
    error_response,
    find_api_keys,
)
from ctx_compress_rag.server.run import LimitedProtocol, open_server_socket
from helpers.decoding import wait_for
from helpers.langchain import TEXTS
from helpers.serving import ANNA, BERT, WAIT, chat, client, json_format, listening, marker, post


def test_a_key_reads_its_own_scopes_markers_only(url: str, store: SoftContextStore) -> None:
    """Another tenant's marker refuses the request, and says nothing of the passage."""
    asked = chat(store)
    own = client(url).chat.completions.create(model="tiny", messages=asked)
    assert own.usage is not None and own.usage.model_extra != {"slots": 0}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="not made with this key for scope 'bert'") as caught:
            client(url, BERT).chat.completions.create(model="tiny", messages=asked, stream=stream)
        assert "anna" not in str(caught.value) and TEXTS["tower"][:20] not in str(caught.value)
        # What a client can do, not what the operator or a chain can.
        assert "or was changed: send its text to POST /v1/compress with this API key" in str(caught.value)
        assert "on_unreadable" not in str(caught.value) and "CTX_COMPRESS_KEY" not in str(caught.value)
    # Nor does the store's own scope, that of markers written without a server, belong to a key.
    default = [{"role": "user", "content": store.marker(store.ids()[0], 8)}]
    with pytest.raises(openai.BadRequestError, match="not made with this key"):
        client(url).chat.completions.create(model="tiny", messages=default)  # type: ignore[arg-type]


def test_scopes_hold_while_tenants_ask_at_once(url: str, store: SoftContextStore) -> None:
    def slots(number: int) -> tuple[bool, int]:
        owner, key = (("anna", ANNA), ("bert", BERT))[number % 2]
        asker = (ANNA, BERT)[number // 2 % 2]
        content: list[Any] = [{"role": "user", "content": f"{marker(store, 'tower', owner)} {number}"}]
        try:
            reply = client(url, asker).chat.completions.create(model="tiny", messages=content, max_tokens=2)
        except openai.BadRequestError:
            return asker == key, 0
        assert reply.usage is not None and reply.usage.model_extra is not None
        return asker == key, reply.usage.model_extra["slots"]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(slots, range(24)))
    assert all((count > 0) is own for own, count in found)


def test_compress_writes_markers_of_the_keys_scope(url: str, store: SoftContextStore) -> None:
    text = "The Harrow Institute was founded in 1911, and it moved to Stavely after the flood."
    before = len(store)
    found = {}
    for key, scope in ((ANNA, "anna"), (BERT, "bert")):
        reply = post(url, "compress", {"input": [text, TEXTS["mill"]], "ratio": 8}, key)
        assert reply.status_code == 200, reply.text
        shown = [item["text"] for item in reply.json()["data"]]
        assert shown == store.markers(store.ensure([text, TEXTS["mill"]], scope=scope), 8, scope)
        found[scope] = shown
        assert len(store.ids(scope)) == 1  # the other text is everyone's
    assert len(store) == before + 2
    assert not set(found["anna"]) & set(found["bert"])
    refused = post(url, "compress", {"input": [found["anna"][0]], "ratio": 8}, BERT)  # not a passage of bert's
    assert refused.status_code == 400 and "was not made with this key" in refused.text
    assert len(store) == before + 2
    reply = post(url, "compress", {"input": text, "ratio": 3})
    assert reply.status_code == 400 and "ratio 3 cannot be made" in reply.json()["error"]["message"]


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", f"Basic {ANNA}", f"Bearer {ANNA}x", "Bearer é"])
def test_nobody_gets_in_without_a_key(url: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/compress"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
    ):
        body = {"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}
        reply = httpx.request(method, url + path, headers=headers, json=body if method == "POST" else None)
        assert reply.status_code == 401, path
        assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_who_has_no_key_takes_nobodys_place(decoder: Decoder, store: SoftContextStore) -> None:
    """Without one no body is waited for: neither a place nor memory is taken by those who send it slowly."""
    limits = ServerLimits(requests=2, answer_tokens=1)
    with listening(create_app(decoder, ApiKeys({ANNA: "anna"}), limits)) as url:
        host, port = url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(4)]
        for path, connection in zip(("chat/completions", "compress") * 2, slow, strict=True):
            head = (
                f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{{"
            )
            connection.sendall(head.encode())
        said = [connection.recv(12) for connection in slow]
        assert said == [b"HTTP/1.1 401"] * 4
        assert client(url).chat.completions.create(model="tiny", messages=chat(store)).choices
        for connection in slow:
            connection.close()


def test_a_key_is_needed_where_another_app_mounts_this_one(decoder: Decoder, store: SoftContextStore) -> None:
    app = Starlette(routes=[Mount("/llm", create_app(decoder, ApiKeys({ANNA: "anna"}), ServerLimits(answer_tokens=2)))])
    inner = app.routes[0].app  # type: ignore[attr-defined]
    app.router.lifespan_context = inner.router.lifespan_context
    with listening(app) as url:
        for path in ("/llm/v1/models", "/llm/v1/chat/completions"):
            assert httpx.request("POST" if "chat" in path else "GET", url + path).status_code == 401
        assert httpx.get(f"{url}/llm/health").status_code == 200
        assert client(f"{url}/llm").chat.completions.create(model="tiny", messages=chat(store)).choices


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'assistant' (got 'tool')"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "0.type: Input should be 'text'"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "bees " * 3000}]}, "window of 1024"),
        ({"messages": [{"role": "user", "content": c} for c in [""] * 1100 + ["x"]]}, "has 1101 messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.0.tool_calls="),
        ({"max_tokens": 0}, "max_tokens: Input should be greater"),
        ({"stop": 5}, "(got 5)"),
        ({"n": 2}, "n=2"),
        ({"unheard": 1}, "unheard=1"),
        ({"frequency_penalty": -0.5}, "frequency_penalty=-0.5"),
        ({"top_logprobs": 2}, "top_logprobs=2"),
        ({"tools": [{"type": "function"}]}, "tools=[{'type': 'function'}]"),
        ({"response_format": {"type": "xml"}}, "response_format={'type': 'xml'}"),
        ({"response_format": {"type": "json_schema"}}, "response_format={'type': 'json_schema'}"),
        ({"response_format": json_format({"type": "nothing"})}, "change the schema"),
        ({"response_format": json_format({"enum": ["x" * 99] * 700})}, "over 65536"),
        ({"response_format": json_format(nested(400))}, "recursion"),
        ({"response_format": json_format({"$ref": "http://somewhere/else"})}, "json_schema"),
    ],
)
def test_what_is_not_served_is_refused_by_name(url: str, body: dict[str, Any], message: str) -> None:
    whole = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **body}
    for stream in (False, True):
        reply = post(url, "chat/completions", content=json.dumps({**whole, "stream": stream}))
        assert reply.status_code == 400, reply.text
        assert message in reply.json()["error"]["message"]
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_bodies_that_are_no_request(url: str) -> None:
    headers = {"Authorization": f"Bearer {ANNA}"}
    for content in (b"", b"{", b"[" * 50_000, b"\xff\xfe", b"[5]", b"null"):
        reply = post(url, "chat/completions", content=content)
        assert reply.status_code == 400, (content[:10], reply.text)
        assert "JSON" in reply.json()["error"]["message"] and reply.json()["error"]["param"] is None
    assert (
        "input.1: Input should be a valid string (got 5)"
        in post(url, "compress", {"input": ["a", 5]}).json()["error"]["message"]
    )
    plain = post(url, "compress", content=b'{"input": "a"}', headers={"Content-Type": "text/plain"})
    assert "send one, with Content-Type: application/json" in plain.json()["error"]["message"]
    for route in ("embeddings", "responses"):
        message = post(url, route, {}).json()["error"]["message"]
        assert message.startswith(f"'POST /v1/{route}' is not served here: there are POST /v1/chat/completions")
        assert "POST /v1/compress" in message and "GET /v1/models" in message
    for path in ("/v1/nothing", "/openapi.json", "/docs"):
        assert httpx.get(url + path, headers=headers).status_code == 404
    assert httpx.get(f"{url}/v1/completions", headers=headers).status_code == 405


def test_a_long_body_is_refused_before_it_is_read(url: str) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 50_000_000:
            sent += 65536
            yield b" " * 65536

    assert post(url, "compress", content=b" " * 100_000).status_code == 400  # no JSON
    for content in (b" " * 100_001, endless()):
        try:
            reply = post(url, "compress", content=content)
        except httpx.WriteError:
            continue  # the server had answered and closed
        assert reply.status_code == 413
        assert "longer than 100000 bytes" in reply.json()["error"]["message"]
    assert sent < 50_000_000
    wait_for(lambda: 'route="/v1/compress",status="413"} 2.0' in httpx.get(f"{url}/metrics").text)


def test_a_deleted_passage_is_said_and_no_path_is_shown(url: str, store: SoftContextStore) -> None:
    text = "Stavely lies on the river Ash."
    [id] = store.ensure([text])
    gone = store.marker(id, 4, "anna")
    store.delete([id])
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="compress again") as caught:
            client(url).chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": gone}], stream=stream
            )
        assert caught.value.code == "passage_not_found"


def test_faults_of_the_server_are_not_explained_to_clients(url: str, store: SoftContextStore, decoder: Decoder) -> None:
    """Neither before the first piece nor in the middle of a stream."""
    passes: list[int] = []

    def fail(*_: Any, **__: Any) -> None:
        passes.append(1)
        if len(passes) > 6:
            raise RuntimeError("/secret/path")

    def ask(stream: bool) -> None:
        list(client(url).chat.completions.create(model="tiny", messages=chat(store), stream=stream))

    with decoder.bundle.backbone.model.register_forward_pre_hook(fail):
        with pytest.raises(openai.APIError, match="failed to answer"):
            ask(stream=True)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="its log says why") as caught:
                ask(stream)
            assert "secret" not in str(caught.value)
    ask(stream=False)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DecoderMemoryError("use fewer passages"), 503),
        (StoreWriteError("/secret/path is full"), 503),
        (ServerError("http://secret:8000 is gone"), 502),
    ],
)
def test_what_may_work_later_has_a_status_that_says_so(error: Exception, status: int) -> None:
    given, body = error_response(error)
    assert given == status and body["error"]["type"] == "server_error" and "secret" not in str(body)


ONE, TWO = "k" * 16, "l" * 40
HEAD = b"POST /v1/compress HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
        yield connection


def sent_until_refused(connection: socket.socket, part: bytes, most: int) -> int:
    """Send a part again and again; return how many bytes were taken until the server closed the connection."""
    sent = 0
    try:
        while sent < most:
            connection.sendall(part)
            sent += len(part)
    except OSError:  # closed
        pass
    return sent


@pytest.mark.parametrize("part", [b"x" * 4096, b"X-Header: value\r\n" * 256], ids=["a line", "lines"])
def test_a_head_without_an_end_is_refused(url: str, part: bytes) -> None:
    with connected(url) as connection:
        connection.sendall(HEAD + b"X: ")
        assert sent_until_refused(connection, part, 64 << 20) < 16 << 20  # what the sockets' buffers may hold
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(decoder: Decoder) -> None:
    app = RequestGuard(create_app(decoder), ServerMetrics(), None, ServerLimits(), seconds=0.3)
    with listening(app) as url, connected(url) as connection:
        connection.sendall(HEAD + b"Content-Length: 99\r\n\r\n{")
        assert connection.recv(12) == b"HTTP/1.1 408"


@pytest.mark.parametrize("name", ["Authorization", "Origin"])
def test_two_headers_where_one_counts_are_refused(url: str, name: str) -> None:
    value = f"Bearer {ANNA}" if name == "Authorization" else "http://localhost"
    reply = httpx.get(f"{url}/v1/models", headers=[("Authorization", f"Bearer {ANNA}"), (name, value), (name, "other")])
    assert reply.status_code == 400 and name.lower() in reply.json()["error"]["message"]


def asked(url: str, headers: dict[str, str], path: str = "/v1/models") -> int:
    return httpx.get(url + path, headers=headers).status_code


def test_without_keys_only_names_of_this_machine_are_served(decoder: Decoder) -> None:
    """A web page whose name leads to this machine could read the store."""
    with listening(create_app(decoder, hosts=["Box.lan"])) as url:
        for name in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "box.lan", "BOX.lan:80"):
            assert asked(url, {"Host": name}) == 200, name
        for name in ("evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "[fe80::1]", "a b", ""):
            for path in ("/v1/models", "/health", "/metrics"):
                assert asked(url, {"Host": name}, path) in (400, 403), name
        for origin in ("http://evil.example", "https://localhost.evil.example", "null"):
            assert asked(url, {"Origin": origin}) == 403, origin
        for origin in ("http://localhost:3000", "https://box.lan"):
            reply = httpx.get(f"{url}/v1/models", headers={"Origin": origin})
            assert reply.status_code == 200
            assert not [name for name in reply.headers if name.startswith("access-control")]


def test_with_keys_every_name_is_served(url: str) -> None:
    assert asked(url, {"Host": "box.example", "Authorization": f"Bearer {ANNA}"}) == 200


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert find_api_keys() is None
    monkeypatch.setenv(KEYS_VARIABLE, f"{ONE} anna,{TWO} bert")
    file = tmp_path / "keys"
    file.write_text(f"# of the tenants\n\n  {ONE}\tberta \n{TWO} bert\n")
    windows = tmp_path / "windows"
    windows.write_text(f"{ONE} anna\n{TWO} bert\n", encoding="utf-8-sig")
    for keys, first in ((find_api_keys(), "anna"), (find_api_keys(file), "berta"), (find_api_keys(windows), "anna")):
        assert keys is not None
        assert keys.scope_of(f"Bearer {ONE}") == keys.scope_of(f"bearer  {ONE}") == first
        assert keys.scope_of(f"Bearer {TWO}") == "bert"
        for wrong in (None, "", "Bearer", "Bearer ", ONE, f"Basic {ONE}", f"Bearer {ONE}x", f"Bearer {ONE[:-1]}"):
            assert keys.scope_of(wrong) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no API key"),
        (ONE, "line 1: write a key and its scope"),
        (f"{ONE} anna\n{ONE} bert", "line 2: repeats the key of scope 'anna'"),
        ("short anna", "scope 'anna' needs 16 or more"),
        (f"{'é' * 16} anna", "scope 'anna' needs 16 or more ASCII"),
    ],
)
def test_malformed_keys_are_refused_and_not_shown(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        find_api_keys(tmp_path / "keys")
    assert ONE not in str(caught.value)


def test_a_network_is_let_in_with_keys_only() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        open_server_socket(host, 0, guarded=False).close()
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match=f"--host {host} .*--api-keys"):
            open_server_socket(host, 0, guarded=False)
    open_server_socket("0.0.0.0", 0, guarded=True).close()


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_clients_that_say_nothing_keep_nobody_out(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six that the server accepts at once, before it reads from any, those silent for longest are closed."""
    monkeypatch.setattr(LimitedProtocol, "most", 2)
    monkeypatch.setattr(LimitedProtocol, "head_seconds", 2 * WAIT)
    with listening(Starlette(), loop) as url:
        silent = [_silent(url) for _ in range(6)]
        assert httpx.get(url, timeout=WAIT).status_code == 404
        for each in silent[:5]:
            with each, suppress(ConnectionResetError):
                assert each.recv(1) == b""
        silent[5].close()


def test_a_head_that_does_not_arrive_in_time_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "head_seconds", 0.1)
    with listening(Starlette()) as url, _silent(url) as silent, suppress(ConnectionResetError):
        assert silent.recv(1) == b""


def _silent(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT)
