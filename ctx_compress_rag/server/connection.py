"""Connections on which no request comes do not stay for long, and do not keep others out.

uvicorn has no limit for the time that a request's head takes, and its limit of connections refuses the newest.
"""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES = 1 << 16
"""Of a request's first line and headers."""


class LimitedProtocol(H11Protocol):
    """A connection of the server."""

    head_seconds = 20.0  # that a request's head may take
    most = 1024  # connections; one more closes that which has been silent for longest

    def connection_made(self, transport: Any) -> None:
        """Make room for it, and wait for a request's head."""
        super().connection_made(transport)
        self._heard = self.loop.time()
        self._deadline = self.loop.call_later(self.head_seconds, transport.abort)
        if len(self.connections) > self.most:
            own = [each for each in self.connections if isinstance(each, LimitedProtocol)]
            silent = [each for each in own if each.cycle is None or each.cycle.response_complete]
            min(silent, key=lambda each: each._heard).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Wait until the head is there, or begin to wait for that of the next request."""
        super().data_received(data)
        self._heard = self.loop.time()
        if self.conn.their_state is not h11.IDLE:
            self._deadline.cancel()
        elif self._deadline.cancelled():
            self._deadline = self.loop.call_later(self.head_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)
