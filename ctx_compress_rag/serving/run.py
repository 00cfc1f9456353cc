"""Run the app on uvicorn until it is told to stop."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.extras import needs

with needs("serve"):
    import uvicorn

_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. A client that keeps one for its next request may send that just as it is
closed, and is dropped: the shorter this is, the more often."""


def serve(app: Any, host: str, port: int, *, grace: int = 30, started: Callable[[str], object] = print) -> None:
    """Serve until SIGINT or SIGTERM; then take nothing new, and give what runs `grace` seconds to end.

    Args:
        app: the ASGI app.
        host: the address to listen on.
        port: the port; 0 takes a free one.
        grace: seconds after which running answers are cut.
        started: is told the address of the server.

    Raises:
        ConfigError: the address cannot be used.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace,
        timeout_keep_alive=_KEEP_ALIVE,
    )
    try:
        socket = config.bind_socket()
    except (OSError, OverflowError, SystemExit) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: choose another --port or --host") from error
    with socket:
        socket.listen(config.backlog)  # clients that read the address may ask at once; uvicorn answers later
        shown = f"[{host}]" if ":" in host else host
        started(f"http://{shown}:{socket.getsockname()[1]}/v1")
        uvicorn.Server(config).run(sockets=[socket])


def check_exposure(host: str, guarded: bool) -> None:
    """Refuse to let a network in without keys.

    Raises:
        ConfigError: the address is not this machine's own, and there are no API keys.
    """
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and not guarded:
        raise ConfigError(f"--host {host} lets others in, and there are no API keys: give --api-keys FILE")
