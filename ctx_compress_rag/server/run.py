"""Listen on an address, and run the app on uvicorn until a signal stops it."""

import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from ctx_compress_rag.errors import ConfigError, needs
from ctx_compress_rag.server.guard import is_local_host

with needs("serve"):
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD_BYTES = 1 << 16  # most bytes of a request's first line and headers
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. A client loses a request that it sends just as the connection closes,
which happens more often with a shorter time."""


class LimitedProtocol(H11Protocol):
    """A connection that closes if a request's head does not arrive in time, so that it keeps no other client out.

    uvicorn lets a head (first line and headers) take any time, and its limit of connections refuses new ones.
    """

    head_seconds = 20.0  # most seconds that a request's head may take
    most = 1024  # connections; one more closes the connection that is silent for longest

    def connection_made(self, transport: Any) -> None:
        """Close the connection that is silent for longest if there are too many, and wait for a request's head."""
        super().connection_made(transport)
        # Not `loop.time()`: uvloop's is in whole milliseconds, in which many connect, and the newest might be closed.
        self._heard = time.perf_counter()
        self._deadline = self.loop.call_later(self.head_seconds, transport.abort)
        own: list[Any] = [each for each in self.connections if not each.transport.is_closing()]
        if len(own) > self.most:
            silent = [each for each in own if each.cycle is None or each.cycle.response_complete]
            min(silent, key=lambda each: each._heard).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Stop the wait when the head has arrived; after an answer, begin to wait for the next head."""
        super().data_received(data)
        self._heard = time.perf_counter()
        if self.conn.their_state is not h11.IDLE:
            self._deadline.cancel()
        elif self._deadline.cancelled():
            self._deadline = self.loop.call_later(self.head_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)


def open_server_socket(host: str, port: int, guarded: bool) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raise ConfigError if not local and not `guarded` by keys."""
    if not guarded and not is_local_host(host):
        raise ConfigError(f"--host {host} serves other machines, but there are no API keys: give --api-keys FILE")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error}): choose another --port or --host") from error


def run_server(app: Any, listener: socket.socket, *, grace: int = 30, started: Callable[[str], object] = print) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; then accept no new requests, and give running ones `grace` seconds.

    `listener` is the socket that `open_server_socket` returned; `started` is called with the API's URL.
    """
    host, port, *_ = listener.getsockname()
    started(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    server = uvicorn.Server(uvicorn_config(app, grace))
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else nohup ignores it
        signal.signal(signal.SIGHUP, server.handle_exit)
    server.run(sockets=[listener])


def uvicorn_config(app: Any, grace: int = 30) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace,
        timeout_keep_alive=_KEEP_ALIVE,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
