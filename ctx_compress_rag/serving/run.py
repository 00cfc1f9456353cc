"""Open what is served, and run the app on uvicorn until it is told to stop."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ctx_compress_rag.app.passage_index import open_index
from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.extras import needs
from ctx_compress_rag.stores import SoftContextStore

with needs("serve"):
    import uvicorn


@contextmanager
def open_store(
    folder: str | Path, bundle: str | None, collection: str | None = None
) -> Iterator[tuple[Bundle, SoftContextStore]]:
    """The bundle and the store to serve.

    Args:
        folder: a Chroma folder.
        bundle: a bundle's folder, shipped name or hub id; None takes the one that an index was made with.
        collection: the app's own collection beside which the soft contexts are; None for an index.

    Raises:
        ConfigError: a collection is given and no bundle.
        StoreError: there is no store, or it cannot be opened.
        BundleError, FingerprintMismatchError: see `Bundle.from_pretrained` and `SoftContextStore`.
    """
    if collection is None:
        with open_index(folder, bundle) as index:
            yield index.bundle, index.store
        return
    if bundle is None:
        raise ConfigError(
            f"--collection {collection} does not say which bundle its soft contexts are of: give --bundle"
        )
    loaded = Bundle.from_pretrained(bundle)
    with SoftContextStore(folder, loaded, collection=collection) as store:
        yield loaded, store


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
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=grace
    )
    try:
        socket = config.bind_socket()
    except (OSError, SystemExit) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: choose another --port or --host") from error
    with socket:
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
