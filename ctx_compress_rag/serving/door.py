"""Every request passes here: it is counted and timed, and beyond the limit it gets status 429."""

from __future__ import annotations

import time
from typing import Any

from ctx_compress_rag.serving.metrics import Metrics
from ctx_compress_rag.serving.replies import fault

_COUNTED = ("/v1/chat/completions", "/v1/completions", "/v1/compress")


class Door:
    """ASGI middleware.

    Args:
        app: the app.
        metrics: where to count.
        most: most requests at a time that need the model.
    """

    def __init__(self, app: Any, metrics: Metrics, most: int) -> None:
        self._app = app
        self._metrics = metrics
        self._most = most
        self._running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request."""
        if scope["type"] != "http" or scope["path"] not in _COUNTED:
            await self._app(scope, receive, send)
            return
        route, began, status = scope["path"], time.perf_counter(), 500

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

    async def _full(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import JSONResponse

        message = f"{self._most} requests are being answered, the most that this server takes: try again"
        body = fault(message, "rate_limit_error", code="too_many_requests")
        await JSONResponse(body, 429, {"Retry-After": "1"})(scope, receive, send)
