"""A real `chroma run` server on loopback."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    """Of a connection just closed: for a minute, who asks for any port does not get this one, and who names it does."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            probe.accept()[0].close()
            client.recv(1)
    return port


@contextmanager
def chroma_server(folder: Path) -> Iterator[int]:
    """The port of a server that keeps its files in a folder and ends with the context."""
    free = free_port()
    # What the program `chroma` calls, without its import of all of chromadb.
    program = [
        sys.executable,
        "-c",
        "import sys, chromadb_rust_bindings as chroma; chroma.cli(['chroma', *sys.argv[1:]])",
    ]
    command = [*program, "run", "--path", str(folder), "--host", "127.0.0.1", "--port", str(free)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", free), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
        yield free
    finally:
        server.terminate()
        server.wait(20)
