"""SoftContextStore against a real `chroma run` server on loopback."""

from collections.abc import Iterator
from contextlib import ExitStack

import chromadb
import pytest
from chromadb.api import ClientAPI

from ctx_compress_rag.errors import ConfigError, StoreError
from ctx_compress_rag.store import AddReport, SoftContextStore
from ctx_compress_rag.store.key import KEY_VARIABLE
from helpers.forked import Forked
from helpers.server import chroma_server
from helpers.store import WRITE, WordBundle, assert_same, passage


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
    assert second.text_of([parts[0], parts[2]]) == [passage(5), passage(6)]
    assert_same(second.fetch([parts[2]])[0], bundle.at(passage(6), 16), tolerance=0.015)
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
    assert store.ids() == ["small"]


def test_two_processes_write_and_four_read_one_server(client: ClientAPI, port: int) -> None:
    """Readers see a passage whole or not at all, and nothing of what was written is lost."""
    code = f"""{WRITE}
import chromadb
bundle, role, start = WordBundle(), sys.argv[2], int(sys.argv[3])
store = SoftContextStore(chromadb.HttpClient("127.0.0.1", int(sys.argv[1])), bundle, collection="shared")
if role == "write":
    for n in range(start, start + 60, 20):
        store.add([passage(i) for i in range(n, n + 20)], [f"p{{i}}" for i in range(n, n + 20)], progress=False)
else:
    seen = 0
    while seen < 120:
        ids = [f"p{{i}}" for i in range(120)]
        found = [each for each in zip(ids, store.get(ids), store.get_passages(ids)) if each[1] and each[2]]
        assert len(found) >= seen, "a passage went away"
        seen = len(found)
        for id, soft, kept in found:
            assert kept.text == passage(int(id[1:])) and soft.n_tokens == 30
"""
    roles = [("write", 0), ("write", 60), *[("read", 0)] * 4]
    with ExitStack() as running:
        for worker in [running.enter_context(Forked(code, port, *role)) for role in roles]:
            ended = worker.finished()
            assert ended.returncode == 0, ended.stderr
    assert len(SoftContextStore(client, WordBundle(), collection="shared")) == 120
