"""Check a request's host and key, the number of requests and the size of the body before the app sees the request.

Each API key opens a scope: a request may read and write only markers of its key's scope. Requests, tokens and times are
counted in Prometheus' format, without anything that clients send. Errors become replies: clients learn what they can
fix, and the log says the rest.
"""

import asyncio
import hashlib
import ipaddress
import logging
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ctx_compress_rag import errors
from ctx_compress_rag.decoding.sampling import Generation
from ctx_compress_rag.errors import ConfigError, needs

with needs("serve"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from starlette.responses import JSONResponse, Response

logger = logging.getLogger(__name__)


class RequestError(Exception):
    """A request refused with an HTTP status; `code` (OpenAI's) and `param` (the field at fault) are null if None."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, "invalid_request_error", param=param, code=code)


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return an error's HTTP status and body, without paths and names of other tenants."""
    match error:
        case RequestError():
            return error.status, error.body
        case errors.MissingPassageError():
            message = "a marker's passage was deleted or its text changed: retrieve or compress again"
            return 404, error_body(message, "invalid_request_error", code="passage_not_found")
        case errors.UnreadableMarkerError():
            # The error's own advice is for the operator: a client has neither the key nor on_unreadable.
            what = str(error).partition(": give")[0]
            return 400, error_body(
                f"{what}: send its text to POST /v1/compress with this API key", "invalid_request_error"
            )
        case errors.ConfigError():
            return 400, error_body(str(error), "invalid_request_error")
        case errors.DecoderMemoryError():
            return 503, error_body(str(error), "server_error", code="out_of_memory")
        case errors.ServerError():
            logger.error("the decoder's server: %s", error)
            return 502, error_body("the server that runs the decoder failed to answer: try again", "server_error")
        case errors.StoreWriteError():
            logger.error("the store cannot be written: %s", error)
            return 503, error_body("the store cannot be written to now: try again later", "server_error")
    logger.error("a request failed", exc_info=error)
    return 500, error_body("the server failed to answer: its log says why", "server_error")


_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        timed = partial(Histogram, buckets=_SECONDS, registry=self.registry)
        self.requests = counter("ctx_compress_requests_total", "Requests answered.", ["route", "status"])
        self.seconds = timed("ctx_compress_request_seconds", "From a request to the end of its answer.", ["route"])
        self.first_token = timed("ctx_compress_first_token_seconds", "From a request to the first piece of its answer.")
        self.running = Gauge("ctx_compress_requests_running", "Requests being answered.", registry=self.registry)
        about = "Tokens of prompts (slots counted in), of slots in them, and of answers."
        self._tokens = counter("ctx_compress_tokens_total", about, ["kind"])
        self.passages = counter("ctx_compress_passages_total", "Texts that clients asked markers for.")

    def count(self, answer: Generation) -> None:
        self._tokens.labels("prompt").inc(answer.prompt_tokens)
        self._tokens.labels("slot").inc(answer.slots)
        self._tokens.labels("completion").inc(answer.completion_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)


KEYS_VARIABLE = "CTX_COMPRESS_API_KEYS"
_MIN_LENGTH = 16


class ApiKeys:
    """A table of the scope (tenant or user) that each API key opens. A key shorter than 16 characters: ConfigError."""

    def __init__(self, scopes: Mapping[str, str]) -> None:
        for key, scope in scopes.items():
            if len(key) < _MIN_LENGTH or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"the API key of scope {scope!r} needs {_MIN_LENGTH} or more ASCII characters: make one with "
                    '`python -c "import secrets; print(secrets.token_urlsafe(32))"`'
                )
            if not scope:
                raise ConfigError("an API key has no scope: give the tenant's or user's id after it")
        # Looked up by digest: how long a look-up takes says nothing about the keys.
        self._scopes = {_digest(key): scope for key, scope in scopes.items()}

    def scope_of(self, authorization: str | None) -> str | None:
        """Return the scope that an `Authorization` header (`Bearer KEY`) opens; None for an unknown or missing key."""
        kind, _, key = (authorization or "").partition(" ")
        return self._scopes.get(_digest(key.strip())) if kind.lower() == "bearer" else None


def find_api_keys(file: str | Path | None = None) -> ApiKeys | None:
    """Return the keys in a file, else in the environment variable `CTX_COMPRESS_API_KEYS`; None if neither is given.

    Each line holds a key and its scope with a space between; a line that begins with # is a comment. In the variable,
    commas may also separate lines. Raises ConfigError for a file that cannot be read and for a malformed line.
    """
    if file is not None:
        try:
            return _parse(Path(file).read_text(encoding="utf-8-sig"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys {str(file)!r}: {error}") from error
    given = os.environ.get(KEYS_VARIABLE)
    return None if given is None else _parse(given.replace(",", "\n"), KEYS_VARIABLE)


def _parse(text: str, where: str) -> ApiKeys:
    scopes: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) != 2:  # not shown, since the line may be a key
            raise ConfigError(f"{where}, line {number}: write a key and its scope, with a space between")
        key, scope = fields
        if key in scopes:
            raise ConfigError(f"{where}, line {number}: repeats the key of scope {scopes[key]!r}: give each key once")
        scopes[key] = scope
    if not scopes:
        raise ConfigError(f"{where} holds no API key: write a key and its scope on each line")
    return ApiKeys(scopes)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


_LOCKED = "/v1/"  # the routes that need a key; the others have no body and are open to all
_COUNTED = ("/v1/chat/completions", "/v1/completions", "/v1/compress")
_ONCE = (b"host", b"origin", b"authorization")  # of two, another program may believe the other


@dataclass(frozen=True)
class ServerLimits:
    """Limits of what clients may ask of the server; a limit below 1 raises ConfigError."""

    body_bytes: int = 4 << 20  # of a request; a longer one gets status 413
    requests: int = 256  # at a time, of all clients; further ones get status 429
    answer_tokens: int = 512  # if the client gives no limit
    longest_answer: int | None = None  # in tokens, even if the client asks for more; None for the decoder's window

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: give 1 or more")


@dataclass
class RequestGuard:
    """ASGI middleware that refuses a request without a valid key before its body is read, and does not count it."""

    app: Any  # gets the key's scope as `state.tenant`, and the body as one message
    metrics: ServerMetrics
    keys: ApiKeys | None  # None lets everyone in, in the store's own scope (None)
    limits: ServerLimits
    # Without keys, names besides this machine's own: a web page whose name leads here could read the store.
    hosts: Collection[str] = ()
    seconds: float = 60  # for the whole body to arrive; then status 408
    _running: int = field(default=0, init=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = str(scope["path"]).removeprefix(scope.get("root_path", ""))  # without another app's prefix
        refusal, tenant = self._refusal(scope["headers"], route.startswith(_LOCKED))
        if refusal is not None:
            if route in _COUNTED:
                self.metrics.requests.labels(route, str(refusal.status_code)).inc()
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        if route in _COUNTED:
            await self._count(route, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, headers: Any, locked: bool) -> tuple[Response | None, str | None]:
        """Return a refusal, or None if the request's headers are accepted, and the scope that its key opens."""
        given = {name: value.decode("latin-1") for name, value in headers}
        for name in _ONCE:
            if sum(name == other for other, _ in headers) > 1:
                return _refused(400, f"two headers {name.decode()!r}: send one"), None
        if self.keys is None:
            # A page of another origin may send requests though it cannot read the answers.
            for header in (b"host", b"origin"):
                if not self._is_own(given.get(header, "localhost")):
                    message = f"{header.decode()} {given[header][:80]!r} is not served: ask localhost, or start the "
                    return _refused(403, message + "server with --allowed-host NAME or with API keys"), None
            return None, None
        tenant = self.keys.scope_of(given.get(b"authorization"))
        if tenant is None and locked:
            message = "no valid API key: send `Authorization: Bearer KEY`"
            return _refused(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}), None
        return None, tenant

    def _is_own(self, address: str) -> bool:
        """Whether a `Host` or `Origin` header names this machine or an allowed host."""
        try:
            name = urlsplit(address if "//" in address else f"//{address}").hostname or ""
        except ValueError:
            return False
        return name in map(str.lower, self.hosts) or is_local_host(name)

    async def _count(self, route: str, scope: Any, receive: Any, send: Any) -> None:
        began, status = time.perf_counter(), 500

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._running += 1
        self.metrics.running.set(self._running)
        try:
            if self._running > self.limits.requests:
                message = f"the server answers its maximum of {self.limits.requests} requests now: try again"
                full = _refused(429, message, "rate_limit_error", "too_many_requests", {"Retry-After": "1"})
                await full(scope, receive, noted)
            else:
                await self._read(scope, receive, noted)
        finally:
            self._running -= 1
            self.metrics.running.set(self._running)
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - began)

    async def _read(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the whole body before the app sees any of it; refuse a body that is too long or too slow."""
        body, more, long = bytearray(), True, False
        try:
            async with asyncio.timeout(self.seconds):
                while more and not long:
                    message = await receive()
                    body += message.get("body", b"")
                    more, long = message.get("more_body", False), len(body) > self.limits.body_bytes
        except TimeoutError:
            await _refused(408, f"the body took more than {self.seconds} s: try again")(scope, receive, send)
            return
        if long:
            message = f"the body is longer than {self.limits.body_bytes} bytes: send fewer or shorter texts"
            await _refused(413, message)(scope, receive, send)
            return
        messages = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()  # the next message is the disconnect

        await self.app(scope, replay, send)


def is_local_host(host: str) -> bool:
    """Whether a host name or address is this machine's own, which other machines cannot reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refused(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    # The body was not read: the connection cannot take another request.
    return JSONResponse(error_body(message, kind, code=code), status, {"Connection": "close", **(headers or {})})
