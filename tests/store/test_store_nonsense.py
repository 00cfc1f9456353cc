"""A Chroma server, or what stands in its place, that answers nonsense or nothing."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import chromadb
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from ctx_compress_rag.errors import CtxCompressError, MissingPassageError, StoreError
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.scope import record_id
from helpers.server import chroma_server
from helpers.serving import listening
from helpers.store import WordBundle, add, passage

KEY = b"sixteen bytes or more"
Change = Callable[[str, Any], Any]


@dataclass
class Liar:
    """A proxy to a Chroma server that changes the answers to requests about collections."""

    upstream: httpx.Client
    change: Change | None = None
    port: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body, headers = await request.body(), {"content-type": "application/json"}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        answer = self.upstream.request(request.method, path, content=body, headers=headers if body else {})
        content = answer.content
        if self.change is not None and "/collections" in path:
            content = json.dumps(self.change(path, answer.json())).encode()
        await Response(content, answer.status_code, headers)(scope, receive, send)


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liar]:
    with (
        chroma_server(tmp_path_factory.mktemp("server")) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as upstream,
        listening(made := Liar(upstream)) as address,
    ):
        made.port = int(address.rpartition(":")[2])
        yield made


def opened(liar: Liar, name: str, **options: Any) -> SoftContextStore:
    client = chromadb.HttpClient("127.0.0.1", liar.port)
    return SoftContextStore(client, WordBundle(), collection=name, key=KEY, **options)


@pytest.fixture
def store(liar: Liar) -> Iterator[SoftContextStore]:
    liar.change = None
    store = opened(liar, "honest")
    add(store, 12)
    yield store
    liar.change = None


NONSENSE: dict[str, Any] = {
    "an empty object": {},
    "null": None,
    "a list": [],
    "a number": 7,
    "a text": "yes",
    "no ids": {"ids": None, "metadatas": None},
    "nested ids": {"ids": [["p6"]], "metadatas": [[{}]]},
    "ids that are numbers": {"ids": [1, 2], "metadatas": [{}, {}]},
    "metadata as a text": {"ids": [record_id("p6", "default")], "metadatas": "all"},
    "metadata that are texts": {"ids": [record_id("p6", "default")], "metadatas": ["x"]},
    "more metadata than ids": {"ids": [], "metadatas": [{}, {}]},
    "another's id": {"ids": ["elsewhere"], "metadatas": [{"marker": "x"}]},
}


@pytest.mark.parametrize("name", NONSENSE)
def test_an_odd_answer_is_the_librarys_own_error_with_the_address(
    liar: Liar, store: SoftContextStore, name: str
) -> None:
    [marker] = opened(liar, "honest").split(store.marker("p6", 4))
    fresh = opened(liar, "honest")  # which looks markers up by field
    calls: list[Callable[[], object]] = [
        lambda: opened(liar, "honest"),
        lambda: store.get(["p6"]),
        lambda: store.get_passages(["p6"]),
        lambda: store.has([passage(6)], ["p6"]),
        lambda: store.ids(),
        lambda: len(store),
        lambda: store.info(),
        lambda: store.damaged(),
        lambda: store.markers(["p6"], 4),
        lambda: fresh.fetch([marker]),  # type: ignore[list-item]
        lambda: store.ensure([passage(6)], ["p6"]),
        lambda: store.delete(["p6"]),
        lambda: store.discard_damaged(),
        lambda: store.add([passage(6)], ["p6"], progress=False),
    ]
    liar.change = lambda path, answer: NONSENSE[name]
    raised = 0
    for call in calls:
        try:
            call()
        except CtxCompressError as error:
            raised += 1
            assert not isinstance(error, StoreError) or str(liar.port) in str(error), error
    assert raised >= len(calls) // 3
    liar.change = None
    assert len(store) == 12 and store.damaged() == []


def test_records_that_were_not_asked_for_are_neither_used_nor_deleted(liar: Liar, store: SoftContextStore) -> None:
    """The server answers every `get` with the records of another collection, of the same bundle and key."""
    other = opened(liar, "other")
    add(other, 12, start=100)
    theirs = chromadb.HttpClient("127.0.0.1", liar.port).get_collection("other-ctx", embedding_function=None)
    everything: Any = theirs.get(include=["metadatas"])

    def change(path: str, answer: Any) -> Any:
        return {**answer, **everything} if re.search(r"/get$", path) else answer

    liar.change = change
    for call in (
        lambda: store.get(["p1", "p2"]),
        lambda: store.get_passages(["p1"]),
        lambda: store.delete(["p1"]),
        lambda: store.markers(["p1"], 4),
    ):
        with pytest.raises((StoreError, MissingPassageError), match="asked for"):
            call()
    liar.change = None
    assert len(store) == len(other) == 12
    assert other.damaged() == store.damaged() == []


def test_a_server_that_never_answers_is_given_up(liar: Liar) -> None:
    store = opened(liar, "silent", read_timeout=0.5)
    add(store, 1)
    answering = threading.Event()

    def change(path: str, answer: Any) -> Any:
        answering.wait(30)
        return answer

    liar.change = change
    began = time.monotonic()
    with pytest.raises(StoreError, match=f"{liar.port} has not answered.*read_timeout"):
        store.get(["p0"])
    assert time.monotonic() - began < 10
    liar.change = None
    answering.set()
    assert store.get(["p0"])[0] is not None
