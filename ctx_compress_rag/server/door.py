"""Check each request's key, count and time it, and refuse it with status 429 beyond the limit."""

from __future__ import annotations

import time
from typing import Any

from ctx_compress_rag.server.api_keys import ApiKeys
from ctx_compress_rag.server.metrics import Metrics
from ctx_compress_rag.server.replies import fault

_LOCKED = "/v1/"  # the routes that need a key; the others have no body and are open to all
_COUNTED = ("/v1/chat/completions", "/v1/completions", "/v1/compress")


class Door:
    """ASGI middleware. Refuses a request without a key before its body is read, and does not count it for `most`.

    Args:
        app: the app; gets the key's scope as `state.tenant`.
        metrics: where to count.
        keys: which key opens which scope; None lets everyone in, in the store's own scope (None).
        most: maximum number of requests at a time that need the model.
    """

    def __init__(self, app: Any, metrics: Metrics, keys: ApiKeys | None, most: int) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = keys
        self._most = most
        self._running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request."""
        if not is_locked(scope):
            await self._app(scope, receive, send)
            return
        route = path_in_app(scope)
        tenant = None if self._keys is None else self._keys.scope_of(_authorization(scope))
        if self._keys is not None and tenant is None:
            if route in _COUNTED:
                self._metrics.requests.labels(route, "401").inc()
            await self._locked(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        if route not in _COUNTED:
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._running += 1
        self._metrics.running.set(self._running)
        try:
            if self._running > self._most:
                await self._full(scope, receive, noted)
            else:
                await self._app(scope, receive, noted)
        finally:
            self._running -= 1
            self._metrics.running.set(self._running)
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - began)

    async def _locked(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import JSONResponse

        message = "no valid API key: send `Authorization: Bearer KEY`"
        body = fault(message, "invalid_request_error", code="invalid_api_key")
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    async def _full(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import JSONResponse

        message = f"the server answers its maximum of {self._most} requests now: try again"
        body = fault(message, "rate_limit_error", code="too_many_requests")
        await JSONResponse(body, 429, {"Retry-After": "1"})(scope, receive, send)


def path_in_app(scope: Any) -> str:
    """A request's path without the prefix at which another app mounts this one."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def is_locked(scope: Any) -> bool:
    """Whether it is a request to a route that needs a key."""
    return scope["type"] == "http" and path_in_app(scope).startswith(_LOCKED)


def _authorization(scope: Any) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), None)
