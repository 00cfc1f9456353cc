"""Records that are not as they were written: refused when read, found and made again."""

import base64
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chromadb
import pytest

from ctx_compress_rag.errors import PayloadError, StoreError
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.store import AddReport, Passage, SoftContextStore
from ctx_compress_rag.store import codec as codecs
from ctx_compress_rag.store.key import KEY_FILE
from ctx_compress_rag.store.record import record_id
from helpers.store import WordBundle, add, assert_same, passage

KEY = b"sixteen bytes or more"
Row = dict[str, Any]


DAMAGE: dict[str, Callable[[Row, Row], Row]] = {
    "another passage's payload": lambda row, other: {"payload": other["payload"]},
    "another passage's text": lambda row, other: {"text": other["text"], "text_hash": other["text_hash"]},
    "another passage's text alone": lambda row, other: {"text": other["text"]},
    "another passage's name": lambda row, other: {"marker": other["marker"]},
    "another passage's record": lambda row, other: other,
    "fewer slots": lambda row, other: {"slots": 1},
    "more tokens": lambda row, other: {"tokens": 31},
    "no slots": lambda row, other: {"slots": "eight"},
    "a payload cut short": lambda row, other: {"payload": row["payload"][:-8]},
    "a text that is none": lambda row, other: {"text": "!"},
    "no payload": lambda row, other: {"payload": 5},
    "zero slots of a right checksum": lambda row, other: {
        "payload": codecs.encode_soft_context(WordBundle().at("x", 4))
    },
    "no signature": lambda row, other: {"signature": ""},
    "other metadata": lambda row, other: {"metadata": '{"source": "https://elsewhere.example"}'},
    "metadata that are none": lambda row, other: {"metadata": 5},
}


def records(folder: Path) -> chromadb.Collection:
    return chromadb.PersistentClient(folder).get_collection("passages-ctx", embedding_function=None)


def spoil(folder: Path, name: str) -> None:
    """Damage the record of p1, perhaps with what is in that of p0."""
    raw, keys = records(folder), [record_id(id, "default") for id in ("p0", "p1")]
    other, row = (dict(raw.get(ids=[key])["metadatas"][0]) for key in keys)
    raw.update(ids=keys[1:], metadatas=[DAMAGE[name](row, other)])


@pytest.mark.parametrize("name", DAMAGE)
def test_a_changed_record_is_refused_and_made_anew(tmp_path: Path, name: str) -> None:
    bundle = WordBundle()
    with SoftContextStore(tmp_path, bundle, key=KEY) as store:
        add(store, 3)
        markers = [store.split(marker)[0] for marker in store.markers(["p0", "p1", "p2"], 4)]
        spoil(tmp_path, name)
        if name in ("a payload cut short", "another passage's payload"):  # the text is still good
            assert store.get_passages(["p1"])[0].text == passage(1)
        reads: list[Callable[[], Any]] = [lambda: store.get(["p1"]), lambda: store.fetch(markers[:2])]
        if name in ("a text that is none", "another passage's text alone"):  # which slots do without
            reads = [lambda: store.get_passages(["p1"])]
        for read in reads:
            with pytest.raises((PayloadError, KeyError), match="'p1' is damaged.*add it again|no passage"):
                read()
        assert_same(store.get(["p2"])[0], bundle.at(passage(2), 4))
        assert store.discard_damaged() == ["p1"]
        assert add(store, 3) == AddReport(added=1, updated=0, unchanged=2)
        assert_same(store.fetch(markers)[1], bundle.at(passage(1), 4))
        assert store.discard_damaged() == []


def test_a_record_of_another_collection_is_refused(tmp_path: Path) -> None:
    bundle = WordBundle()
    with (
        SoftContextStore(tmp_path, bundle, key=KEY) as store,
        SoftContextStore(tmp_path, bundle, key=KEY, collection="other") as other,
    ):
        add(store, 1)
        other.add([passage(7)], ["p0"], progress=False)
        theirs: Any = chromadb.PersistentClient(tmp_path).get_collection("other-ctx", embedding_function=None).get()
        records(tmp_path).update(ids=theirs["ids"], metadatas=theirs["metadatas"])
        for read in (lambda: store.get(["p0"]), lambda: store.get_passages(["p0"]), lambda: store.markers(["p0"], 4)):
            with pytest.raises(PayloadError, match="'p0'.*collection"):
                read()
        assert store.discard_damaged() == ["p0"] and other.damaged() == []


def test_a_text_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, WordBundle(), key=KEY) as store:
        add(store, 1)
        bomb = base64.b64encode(zlib.compress(b"a" * (100 << 20), 9)).decode()
        records(tmp_path).update(ids=[record_id("p0", "default")], metadatas=[{"text": bomb}])
        with pytest.raises(PayloadError, match="unpacks to more than 16,777,216 bytes"):
            store.get_passages(["p0"])


@pytest.mark.parametrize("scope", ["default", "alice"])
def test_a_retrieval_makes_damaged_slots_anew(tmp_path: Path, scope: str) -> None:
    bundle = WordBundle()
    with SoftContextStore(tmp_path, bundle, key=KEY) as store:
        store.add([Passage(passage(i), f"p{i}", {"page": i}) for i in range(3)], progress=False)
        spoil(tmp_path, "zero slots of a right checksum")
        texts = [passage(i) for i in range(3)]
        with pytest.raises(PayloadError, match="'p1' is damaged"):
            mark_texts(store, texts, ["p0", "p1", "p2"], scope=scope, on_missing="error")
        left = mark_texts(store, texts, ["p0", "p1", "p2"], scope=scope, on_missing="text")
        assert [text.startswith("[[ctx:") for text in left] == [True, False, True]
        shown = mark_texts(store, texts, ["p0", "p1", "p2"], scope=scope)
        markers = [part for text in shown for part in store.split(text, scope)]
        assert [len(call) for call in bundle.calls] == [3, 1]
        assert_same(store.fetch(markers)[1], bundle.at(passage(1), 4))
        assert store.get_passages(["p1"], scope)[0].metadata == {"page": 1}
        assert store.damaged() == ([] if scope == "default" else ["p1"])  # others' records are theirs to mend


def test_a_broken_signature_costs_its_own_passage_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SoftContextStore(tmp_path, WordBundle(), key=KEY) as store:
        add(store, 3)
        spoil(tmp_path, "more tokens")
        texts = [passage(i) for i in range(3)]
        shown = mark_texts(store, texts, ["p0", "p1", "p2"])
        assert [text.startswith("[[ctx:") for text in shown] == [True, False, True] and shown[1] == passage(1)
        assert "p1" in caplog.text and "another key" in caplog.text
        with pytest.raises(PayloadError, match="'p1' is damaged"):
            mark_texts(store, texts, ["p0", "p1", "p2"], on_missing="error")


@pytest.mark.parametrize("key", ["", "short"])
def test_a_short_key_is_refused(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTX_COMPRESS_KEY", key)
    with pytest.raises(StoreError, match="at least 16"):
        add(SoftContextStore(tmp_path, WordBundle()), 1)


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.name != "posix" or os.getuid() != 0:
        pytest.skip("needs a second user")
    path = tmp_path / KEY_FILE
    path.write_text("ab" * 32)
    path.chmod(0o600)
    os.chown(path, 65534, -1)
    with pytest.raises(StoreError, match="belongs to user 65534"):
        add(SoftContextStore(tmp_path, WordBundle()), 1)
    monkeypatch.setenv("CTX_COMPRESS_KEY", "as the error says: set this")
    with SoftContextStore(tmp_path, WordBundle()) as store:
        add(store, 1)
        assert store.get(["p0"])[0] is not None


def test_a_process_reads_a_damaged_folder_once_it_is_restored(tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, WordBundle(), key=KEY) as store:
        store.add([passage(1)], ["one"], progress=False)
    database = tmp_path / "chroma.sqlite3"
    whole = database.read_bytes()
    database.write_bytes(b"no database" * 500)
    for _ in range(3):
        with pytest.raises(StoreError, match="Chroma failed"):
            SoftContextStore(tmp_path, WordBundle(), key=KEY)
    database.write_bytes(whole)
    with SoftContextStore(tmp_path, WordBundle(), key=KEY) as store:
        assert store.add([passage(2)], ["two"], progress=False).added == 1
        assert sorted(store.ids()) == ["one", "two"]
