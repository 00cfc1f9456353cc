"""Listen on an address, and run the app on uvicorn until a signal stops it."""

import signal
import socket
from collections.abc import Callable
from typing import Any

from ctx_compress_rag.errors import ConfigError, needs
from ctx_compress_rag.server.guard import is_local_host

with needs("serve"):
    import uvicorn

_HEAD_BYTES = 1 << 16  # most bytes of a request's first line and headers
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. A client loses a request that it sends just as the connection closes,
which happens more often with a shorter time."""


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
    """Serve on a socket until SIGINT, SIGTERM or SIGHUP, then end in `grace` seconds; `started` gets the API's URL."""
    host, port, *_ = listener.getsockname()
    started(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    server = uvicorn.Server(uvicorn_config(app, grace))
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else nohup ignores it
        signal.signal(signal.SIGHUP, server.handle_exit)
    server.run(sockets=[listener])


def uvicorn_config(app: Any, grace: int = 30) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",  # httptools does not limit a head
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace,
        timeout_keep_alive=_KEEP_ALIVE,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
