"""SoftContextStore against a real `chroma run` server on loopback, and one that answers nonsense or nothing."""

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
from chromadb.api import ClientAPI
from starlette.requests import Request
from starlette.responses import Response

from ctx_compress_rag.errors import ConfigError, CtxCompressError, MissingPassageError, StoreError
from ctx_compress_rag.store import AddReport, SoftContextStore
from ctx_compress_rag.store.key import KEY_VARIABLE
from ctx_compress_rag.store.record import record_id
from helpers.server import chroma_server
from helpers.serving import listening
from helpers.store import WordBundle, add, assert_same, passage

KEY = b"sixteen bytes or more"
Change = Callable[[str, Any], Any]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with chroma_server(tmp_path_factory.mktemp("server")) as free:
        yield free


@pytest.fixture
def client(port: int, monkeypatch: pytest.MonkeyPatch) -> ClientAPI:
    monkeypatch.setenv(KEY_VARIABLE, "a key that all machines share")
    return chromadb.HttpClient("127.0.0.1", port)


def test_add_get_delete_and_markers(client: ClientAPI, port: int) -> None:
    bundle = WordBundle()
    store = SoftContextStore(client, bundle, collection="round-trip")
    ids = [f"p{i}" for i in range(300)]
    texts = [passage(i) for i in range(300)]
    assert store.add(texts, ids, progress=False) == AddReport(added=300, updated=0, unchanged=0)
    second = SoftContextStore(chromadb.HttpClient("127.0.0.1", port), bundle, collection="round-trip")
    assert second.add(texts, ids, progress=False).unchanged == 300
    for id, soft in zip(["p299", "p0", "p0"], second.get(["p299", "p0", "p0"]), strict=True):
        assert_same(soft, bundle.at(passage(int(id[1:])), 4))
    parts = second.split(" ".join(store.markers(["p5", "p6"], 16)))
    read = second.read([parts[0], parts[2]])
    assert [each.text for each in read] == [passage(5), passage(6)]
    assert_same(read[1].soft, bundle.at(passage(6), 16), tolerance=0.015)
    assert store.delete(ids[:100]) == 100
    assert len(second) == 200
    info = second.info()
    assert (info.location, info.disk_bytes, info.passages) == (f"the Chroma server 127.0.0.1:{port}", None, 200)


def test_another_tenants_database(client: ClientAPI, port: int) -> None:
    admin = chromadb.AdminClient(client.get_settings())
    admin.create_database("second")
    other = chromadb.HttpClient("127.0.0.1", port, database="second")
    rag = other.create_collection("mine", embedding_function=None)
    SoftContextStore(rag, WordBundle()).ensure([passage(1)], ["a"])
    assert "mine-ctx" in {collection.name for collection in other.list_collections()}
    assert "mine-ctx" not in {collection.name for collection in client.list_collections()}


async def test_an_asynchronous_client_is_refused(port: int) -> None:
    client = await chromadb.AsyncHttpClient("127.0.0.1", port)
    with pytest.raises(ConfigError, match="asynchronous"):
        SoftContextStore(client, WordBundle())


def test_a_server_needs_a_key_that_all_share(
    client: ClientAPI, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(StoreError, match=f"{KEY_VARIABLE}.*key="):
        SoftContextStore(client, WordBundle(), collection="keyless")
    assert list(home.iterdir()) == []
    SoftContextStore(client, WordBundle(), collection="keyless", key=b"sixteen bytes or more")


def test_a_record_that_the_server_takes_in_no_request_is_named(client: ClientAPI) -> None:
    wide = WordBundle(base_ratio=1, dim=4096)
    store = SoftContextStore(client, wide, collection="too-wide", codec="fp16")
    with pytest.raises(StoreError, match="'big' takes .* bytes .*smaller passages"):
        store.add(["some words", " ".join(["word"] * 4200)], ["small", "big"], progress=False)
    assert store.add(["some words"], ["small"], progress=False).added == 1 and store.ids() == ["small"]


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
def liar(port: int) -> Iterator[Liar]:
    with (
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
    "no ids": {"ids": None, "metadatas": None},
    "nested ids": {"ids": [["p6"]], "metadatas": [[{}]]},
    "ids that are numbers": {"ids": [1, 2], "metadatas": [{}, {}]},
    "metadata that are texts": {"ids": [record_id("p6", "default")], "metadatas": ["x"]},
    "more metadata than ids": {"ids": [], "metadatas": [{}, {}]},
    "another's id": {"ids": ["elsewhere"], "metadatas": [{"marker": "x"}]},
}


def test_an_odd_answer_is_the_librarys_own_error_with_the_address(liar: Liar, store: SoftContextStore) -> None:
    [marker] = opened(liar, "honest").split(store.marker("p6", 4))
    calls: list[Callable[[], object]] = [
        lambda: opened(liar, "honest"),
        lambda: store.get(["p6"]),
        lambda: store.get_passages(["p6"]),
        lambda: store.stored_ids([passage(6)], ["p6"]),
        lambda: store.ids(),
        lambda: len(store),
        lambda: store.info(),
        lambda: store.damaged(),
        lambda: store.markers(["p6"], 4),
        lambda: store.read([marker]),  # type: ignore[list-item]
        lambda: store.ensure([passage(6)], ["p6"]),
        lambda: store.delete(["p6"]),
        lambda: store.discard_damaged(),
        lambda: store.add([passage(6)], ["p6"], progress=False),
    ]
    for name, nonsense in NONSENSE.items():
        liar.change = lambda path, answer, nonsense=nonsense: nonsense  # type: ignore[misc]
        raised = 0
        for call in calls:
            try:
                call()
            except CtxCompressError as error:
                raised += 1
                assert not isinstance(error, StoreError) or str(liar.port) in str(error), error
        assert raised >= len(calls) // 3, name
        liar.change = None
        assert len(store) == 12 and store.damaged() == [], name


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


def test_a_connection_that_the_server_has_closed_is_opened_again(
    store: SoftContextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = httpx.Client.send

    def closed(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        raise httpx.RemoteProtocolError("Server disconnected without sending a response.")

    monkeypatch.setattr(httpx.Client, "send", closed)
    assert store.get(["p1"])[0] is not None and httpx.Client.send is send


def test_a_server_that_never_answers_is_given_up(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(liar, "silent")
    add(store, 1)
    monkeypatch.setattr(store._records, "_read_timeout", 0.3)  # in which a busy machine may not answer either
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
    monkeypatch.undo()
    assert store.get(["p0"])[0] is not None
