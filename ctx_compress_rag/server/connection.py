"""Close connections that send no request, so that they do not keep other clients out.

uvicorn lets a request's head (first line and headers) take any time, and its limit of connections refuses new ones.
"""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES = 1 << 16  # most bytes of a request's first line and headers


class LimitedProtocol(H11Protocol):
    """A connection of the server, which closes if a request's head does not arrive in time."""

    head_seconds = 20.0  # most seconds that a request's head may take
    most = 1024  # connections; one more closes the connection that is silent for longest

    def connection_made(self, transport: Any) -> None:
        """Close the connection that is silent for longest if there are too many, and wait for a request's head."""
        super().connection_made(transport)
        self._heard = self.loop.time()
        self._deadline = self.loop.call_later(self.head_seconds, transport.abort)
        if len(self.connections) > self.most:
            own = [each for each in self.connections if isinstance(each, LimitedProtocol)]
            silent = [each for each in own if each.cycle is None or each.cycle.response_complete]
            min(silent, key=lambda each: each._heard).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Stop the wait when the head has arrived; after an answer, begin to wait for the next head."""
        super().data_received(data)
        self._heard = self.loop.time()
        if self.conn.their_state is not h11.IDLE:
            self._deadline.cancel()
        elif self._deadline.cancelled():
            self._deadline = self.loop.call_later(self.head_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)
