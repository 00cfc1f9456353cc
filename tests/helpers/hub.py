"""A Hugging Face hub on this machine, as far as downloads need one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """Folders as repositories, all at `COMMIT`.

    Attributes:
        folders: the repositories by id.
        license: of each repository's card.
        gated: ids of those that need an account.
        cut: how many bytes of a file are sent before the connection breaks, by file name; once each.
        sent: bytes that were sent of each file, by "id/name".
        address: where it listens.
    """

    folders: dict[str, Path]
    license: str = "apache-2.0"
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    address: str = ""


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve a hub until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def answer(self, body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if api else parts[:2])
            folder = hub.folders.get(name)
            if folder is None:
                return self.refuse(404, "RepoNotFound")
            if name in hub.gated and not api:
                return self.refuse(403, "GatedRepo")
            if api:
                paths = sorted(path for path in folder.rglob("*") if path.is_file())
                files = [{"rfilename": p.relative_to(folder).as_posix(), "size": p.stat().st_size} for p in paths]
                about = {"id": name, "sha": COMMIT, "siblings": files, "cardData": {"license": hub.license}}
                return self.send(json.dumps(about).encode(), {"Content-Type": "application/json"}, body)
            file = "/".join(parts[4:])
            if not (folder / file).is_file():
                return self.refuse(404, "EntryNotFound")
            content = (folder / file).read_bytes()
            about = {
                "X-Repo-Commit": COMMIT,
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "Accept-Ranges": "bytes",
            }
            return self.send(content, about, body, f"{name}/{file}")

        def send(self, content: bytes, headers: dict[str, str], body: bool, file: str = "") -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                cut = hub.cut.pop(file.rpartition("/")[2], None)
                self.wfile.write(content[:cut])
                hub.sent[file] = hub.sent.get(file, 0) + len(content[:cut])
                self.close_connection = cut is not None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
