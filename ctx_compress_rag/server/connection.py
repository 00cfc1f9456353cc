"""Connections that hold little memory, and not for long, until a whole request has come, whoever made them.

uvicorn's protocol for h11 is the base, since httptools has no limit for headers. It has no limit for the time that a
request's head takes, for connections that have not sent one, and for what a chunk announces.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES = 1 << 16
"""Of a request's first line and headers."""
_HEAD_SECONDS = 20
_CONNECTIONS = 1024
_CHUNK_BYTES = 1 << 32


class LimitedProtocol(H11Protocol):
    """A connection of the server."""

    head_seconds: float = _HEAD_SECONDS
    most: int = _CONNECTIONS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Close it if there are too many; else wait for a request's head, but not for long."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._set_deadline()

    def data_received(self, data: bytes) -> None:
        """Refuse a chunk longer than any body as soon as its length is known."""
        super().data_received(data)
        # h11 has no public name for it; without this one, the time limit of a body refuses such a chunk.
        announced = getattr(getattr(self.conn, "_reader", None), "_bytes_in_chunk", 0)
        if announced > _CHUNK_BYTES and self.conn.our_state is h11.SEND_RESPONSE:
            self.cycle.disconnected = True  # the app's own answer comes too late
            self.send_400_response("A chunk of the body is too long.")
        if self.conn.their_state is not h11.IDLE:
            self._clear_deadline()
        elif self._deadline is None:  # the head of the next request on this connection
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._clear_deadline()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
