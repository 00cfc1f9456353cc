"""A Hugging Face hub on this machine, as far as downloads need one."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from helpers.serving import listening

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """Folders as repositories, all at `COMMIT`."""

    folders: dict[str, Path]  # by id
    gated: set[str] = field(default_factory=set)  # ids of those that need an account
    cut: dict[str, int] = field(default_factory=dict)  # bytes of a file, by name, before the connection breaks once
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file, by "id/name"
    address: str = ""


def refused(status: int, code: str) -> Response:
    return Response(status_code=status, headers={"X-Error-Code": code})


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    app = FastAPI()

    @app.get("/api/models/{owner}/{name}{rest:path}")
    def about(owner: str, name: str) -> Any:
        id = f"{owner}/{name}"
        if id not in hub.folders:
            return refused(404, "RepoNotFound")
        paths = sorted(path for path in hub.folders[id].rglob("*") if path.is_file())
        files = [{"rfilename": str(p.relative_to(hub.folders[id])), "size": p.stat().st_size} for p in paths]
        return {"id": id, "sha": COMMIT, "siblings": files, "cardData": {"license": "apache-2.0"}}

    @app.api_route("/{owner}/{name}/resolve/{revision}/{file:path}", methods=["GET", "HEAD"])
    def content(owner: str, name: str, file: str, request: Request) -> Any:
        id = f"{owner}/{name}"
        if id in hub.gated:
            return refused(403, "GatedRepo")
        if not (path := hub.folders[id] / file).is_file():
            return refused(404, "EntryNotFound")
        whole = path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(whole).hexdigest()}"'}
        headers["Content-Length"] = str(len(whole))
        if request.method == "HEAD":
            return Response(headers=headers)
        sent = whole[: hub.cut.pop(path.name, None)]
        hub.sent[f"{id}/{file}"] = hub.sent.get(f"{id}/{file}", 0) + len(sent)
        return StreamingResponse(iter([sent]), headers=headers)

    with listening(app) as hub.address:
        yield hub
