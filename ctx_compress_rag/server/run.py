"""Run the app on uvicorn until a signal stops it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.extras import needs

with needs("serve"):
    import uvicorn

    from ctx_compress_rag.server.connection import HEAD_BYTES, LimitedProtocol

_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. A client that reuses a connection may send a request just as it closes,
and loses the request: the shorter this time, the more often."""


def serve(app: Any, host: str, port: int, *, grace: int = 30, started: Callable[[str], object] = print) -> None:
    """Serve until SIGINT or SIGTERM; then accept no new requests, and give running ones `grace` seconds.

    Args:
        app: the ASGI app.
        host: the address to listen on.
        port: the port; 0 takes a free one.
        grace: seconds after which running answers are cut.
        started: called with the server's address.

    Raises:
        ConfigError: the address cannot be used.
    """
    config = configuration(app, host, port, grace)
    try:
        socket = config.bind_socket()
    except (OSError, OverflowError, SystemExit) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: choose another --port or --host") from error
    with socket:
        socket.listen(config.backlog)  # clients that read the address may connect at once; uvicorn answers later
        shown = f"[{host}]" if ":" in host else host
        started(f"http://{shown}:{socket.getsockname()[1]}/v1")
        uvicorn.Server(config).run(sockets=[socket])


def configuration(app: Any, host: str, port: int, grace: int = 30) -> uvicorn.Config:
    """How the app is run; see `serve`."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=LimitedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace,
        timeout_keep_alive=_KEEP_ALIVE,
        h11_max_incomplete_event_size=HEAD_BYTES,
    )


def check_exposure(host: str, guarded: bool) -> None:
    """Refuse to serve a network without API keys.

    Raises:
        ConfigError: the address is not this machine's own, and there are no API keys.
    """
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and not guarded:
        raise ConfigError(f"--host {host} serves other machines, but there are no API keys: give --api-keys FILE")
