"""The real app on a real socket, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

WAIT = 120


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of a server that ends with the context."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + WAIT
        while not server.started:
            assert thread.is_alive() and time.monotonic() < until, "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()
