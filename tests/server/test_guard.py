"""What strangers may cost the server, which names it answers to without keys, and what is a key file."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.server.api_keys import KEYS_VARIABLE, find_api_keys
from ctx_compress_rag.server.app import create_app
from ctx_compress_rag.server.connection import LimitedProtocol
from ctx_compress_rag.server.guard import RequestGuard, ServerLimits
from ctx_compress_rag.server.metrics import ServerMetrics
from ctx_compress_rag.server.run import open_server_socket
from helpers.langchain import QUESTION
from helpers.serving import ANNA, WAIT, listening, post

ONE, TWO = "k" * 16, "l" * 40
HEAD = b"POST /v1/compress HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
AUTHORIZED = HEAD + f"Authorization: Bearer {ANNA}\r\n".encode()


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


def closed(connection: socket.socket) -> bool:
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(("first", "more"), [(b"", b""), (b"GET /h", b"eal"), (REQUEST + b"GET /h", b"eal")])
def test_a_head_that_does_not_come_is_not_waited_for(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, first: bytes, more: bytes
) -> None:
    """Neither at the beginning, nor sent byte by byte, nor after another request."""
    monkeypatch.setattr(LimitedProtocol, "head_seconds", 0.5)
    with listening(create_app(decoder)) as url, connected(url) as connection:
        connection.sendall(first)
        time.sleep(0.3)
        if first.startswith(REQUEST):
            assert b"200 OK" in connection.recv(4096)
        connection.sendall(more)
        assert closed(connection)


def test_silent_connections_keep_nobody_out(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that sends nothing nor one that is idle after a request: each goes when another comes."""
    monkeypatch.setattr(LimitedProtocol, "most", 1)
    monkeypatch.setattr(LimitedProtocol, "head_seconds", WAIT)
    with listening(create_app(decoder)) as url, connected(url) as silent:
        time.sleep(0.1)  # by the server's clock, in milliseconds, it came first
        with connected(url) as idle:
            assert closed(silent)
            idle.sendall(REQUEST)
            assert b"200 OK" in idle.recv(4096)
            time.sleep(0.1)
            assert httpx.get(f"{url}/health").status_code == 200
            assert closed(idle)


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


def test_chunks_are_read(url: str) -> None:
    """Some clients send all bodies so."""
    with connected(url) as connection:
        connection.settimeout(WAIT)
        body = b'{"input": "Orla kept bees.", "ratio": 8}'
        connection.sendall(AUTHORIZED + b"Transfer-Encoding: chunked\r\n\r\n")
        for part in (body[:7], body[7:], b""):
            connection.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are read from /proc")
def test_canceled_requests_leave_nothing(url: str) -> None:
    """But the threads of the loop's pool and the writer, which start when needed and stay, and a file for each."""
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 500}

    def canceled(times: int) -> tuple[int, int]:
        with httpx.Client(headers={"Authorization": f"Bearer {ANNA}"}) as http:
            for _ in range(times):
                with pytest.raises(httpx.ReadTimeout):
                    http.post(f"{url}/v1/chat/completions", json=body, timeout=httpx.Timeout(WAIT, read=0.02))
        post(url, "completions", {"model": "tiny", "prompt": "x"})
        pools = ("ctx-compress-", "asyncio_", "uvloop_")
        others = [thread for thread in threading.enumerate() if not thread.name.startswith(pools)]
        return len(others), len(list(Path("/proc/self/fd").iterdir()))

    before, after = canceled(10), canceled(100)
    assert after[0] <= before[0] and after[1] <= before[1] + 5, (before, after)


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
