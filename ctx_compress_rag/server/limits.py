"""Limit how long a request's body is, and how long it takes to arrive."""

from __future__ import annotations

import asyncio
from typing import Any

from ctx_compress_rag.server.door import is_locked
from ctx_compress_rag.server.replies import fault

_SECONDS = 60


class BodyLimit:
    """ASGI middleware that reads a request's body before the app sees any of it, and refuses one that is too long.

    Bodies sent to open routes are not read at all.

    Args:
        app: the app.
        most: the longest body, in bytes.
        seconds: how long a client may take to send it.
    """

    def __init__(self, app: Any, most: int, seconds: float = _SECONDS) -> None:
        self._app = app
        self._most = most
        self._seconds = seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request."""
        if not is_locked(scope):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._body(receive)
        except TimeoutError:
            await self._refuse(scope, receive, send, 408, f"the body took more than {self._seconds} s: try again")
            return
        if body is None:
            what = f"the body is longer than {self._most} bytes: send fewer or shorter texts"
            await self._refuse(scope, receive, send, 413, what)
            return
        given = False

        async def replay() -> Any:
            nonlocal given
            if given:
                return await receive()  # the next message is the disconnect
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _body(self, receive: Any) -> bytes | None:
        parts, length = [], 0
        while True:
            message = await receive()
            part: bytes = message.get("body", b"")
            length += len(part)
            if length > self._most:
                return None
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    @staticmethod
    async def _refuse(scope: Any, receive: Any, send: Any, status: int, message: str) -> None:
        from starlette.responses import JSONResponse

        reply = JSONResponse(fault(message, "invalid_request_error"), status, {"Connection": "close"})
        await reply(scope, receive, send)
