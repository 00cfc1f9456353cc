"""Markers, read back exactly and refused when forged; their keys; records that are not as they were written."""

import base64
import logging
import os
import re
import sqlite3
import stat
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chromadb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_compress_rag.errors import MissingPassageError, PayloadError, RatioError, StoreError
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.store import AddReport, Passage, SoftContextStore
from ctx_compress_rag.store import codec as codecs
from ctx_compress_rag.store.key import KEY_FILE, KEY_VARIABLE, key_from_file
from ctx_compress_rag.store.marker import Marker, Signer, escaped_markers
from ctx_compress_rag.store.place import DRAFT, LOCK_FILE
from ctx_compress_rag.store.record import record_id
from ctx_compress_rag.text.chat import chat_text
from helpers.forked import run_python
from helpers.store import WRITE, WordBundle, add, assert_same, passage

KEY = b"k" * 32
SIGNER = Signer(KEY, "f" * 64)
LETTERS = "abcdefghijklmnop"


def test_the_form_is_the_documented_one() -> None:
    written = SIGNER.write(SIGNER.passage("some text"), 4, 16, "default")
    assert len(written) == len("[[ctx:]]") + 20 + 1 + 2 + 1 + 16
    head, slots, tag = written.removeprefix("[[ctx:").removesuffix("]]").split(".")
    assert (len(head), slots, len(tag)) == (20, "16", 16)
    assert set(head + tag) <= set(LETTERS)
    with pytest.raises(RatioError, match="4097"):  # which three letters cannot say
        SIGNER.write(SIGNER.passage("some text"), 4097, 16, "default")


def test_the_same_text_has_the_same_marker_and_nothing_else_has() -> None:
    other_key, other_bundle = Signer(b"x" * 32, "f" * 64), Signer(KEY, "e" * 64)
    name = SIGNER.passage("text")
    assert name == Signer(KEY, "f" * 64).passage("text")
    assert len({name, SIGNER.passage("text "), other_key.passage("text"), other_bundle.passage("text")}) == 4
    assert SIGNER.sign("1", "23") != SIGNER.sign("12", "3")  # numbers of a record do not run into each other


def test_a_forged_marker_is_logged_once_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    forged = f"[[ctx:{'a' * 20}.16.{'b' * 16}]]"
    good = SIGNER.write("p" * 17, 1, 3, "t")
    with caplog.at_level(logging.WARNING):
        parts = SIGNER.split(f"{forged} and {forged}{good}", "t")
    assert parts[0] == f"{forged} and {forged}"
    assert isinstance(parts[1], Marker)
    [record] = caplog.records
    assert "2 marker(s)" in record.message and "'t'" in record.message


@pytest.mark.parametrize("before", ["", "[", "[[", "a[[[[["])
@pytest.mark.parametrize("after", ["", "]", "]]"])
def test_what_is_escaped_is_no_marker_however_many_brackets_stand_around_it(before: str, after: str) -> None:
    good = SIGNER.write("p" * 17, 1, 3, "t")
    left = escaped_markers(f"{before}{good}{good}{after} [[words]]")
    assert SIGNER.split(left, "t", "error") == [left]
    assert SIGNER.split(f"[{left}]", "t", "error") == [f"[{left}]"]
    assert left.replace("ctx", "ctx:") == f"{before}{good}{good}{after} [[words]]"


@pytest.mark.parametrize(
    "unit",
    [
        "[[ctx:",
        "[",
        "[[ctx:" + "a" * 20,
        "[[ctx:" + "a" * 20 + ".1",
        "[[ctx:" + "a" * 20 + ".16." + "b" * 16 + "]",
        "[[ctx:" + "a" * 20 + ".16." + "b" * 16 + "]]",
    ],
)
def test_hostile_text_takes_linear_time(unit: str) -> None:
    text = unit * (2_000_000 // len(unit))

    def seconds() -> float:
        began = time.process_time()
        assert SIGNER.split(text, "t") == [text]
        return time.process_time() - began

    assert any(seconds() < 1.0 for _ in range(3))  # 0.02 to 0.2 s when measured; quadratic time would be minutes


@pytest.mark.parametrize("ratio", [4, 8, 12, 16, 28, 32, 400, 16384])
def test_a_marker_fetches_its_passage_at_its_ratio(store: SoftContextStore, bundle: WordBundle, ratio: int) -> None:
    texts = [passage(i, words) for i, words in enumerate((1, 4, 5, 17, 30, 37))]
    ids = store.ensure(texts)
    markers = store.markers(ids, ratio)
    assert markers == store.markers(ids, ratio)
    parts = store.split("Read: " + " and ".join(markers) + "?")
    found = parts[1::2]
    assert parts[::2] == ["Read: ", *[" and "] * 5, "?"]
    for marker, read, text in zip(found, store.read(found), texts, strict=True):
        direct = bundle.at(text, ratio)
        assert marker.slots == read.soft.n_slots == direct.n_slots
        assert_same(read.soft, direct, tolerance=0.015)
        assert read.text == text
    assert store.read(found[::-1])[0].soft.n_tokens == 37
    assert store.read([]) == []


def test_a_marker_lasts_as_long_as_its_text(store: SoftContextStore, bundle: WordBundle) -> None:
    add(store, 2)
    parts = store.split("".join(store.markers(["p0", "p1"], 8)))
    store.add([passage(0), passage(77)], ["copy", "p1"], progress=False)
    store.delete(["p0"])
    assert_same(store.read(parts[:1])[0].soft, bundle.at(passage(0), 8), tolerance=0.015)  # of the copy
    store.delete(["copy"])
    for marker in parts:
        with pytest.raises(MissingPassageError, match="retrieve again"):
            store.read([marker])
    with pytest.raises(MissingPassageError, match="'p0' is not stored"):
        store.markers(["p1", "p0"], 8)


@pytest.mark.parametrize("ratio", [0, -4, 2, 6])
def test_a_ratio_that_cannot_be_made_is_refused(store: SoftContextStore, ratio: int) -> None:
    add(store, 1)
    with pytest.raises(RatioError, match=f"ratio {ratio} .*multiple of 4"):
        store.marker("p0", ratio)


def test_the_key_file_is_private_and_shared_by_processes(store: SoftContextStore, tmp_path: Path) -> None:
    add(store, 1)
    path = tmp_path / "chroma" / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code = f"{WRITE}print(SoftContextStore(sys.argv[1], WordBundle()).marker('p0', 8))"
    assert run_python(code, tmp_path / "chroma").stdout.strip() == store.marker("p0", 8)
    key = path.read_text()  # which Chroma does not have
    dump = "\n".join(sqlite3.connect(tmp_path / "chroma" / "chroma.sqlite3").iterdump())
    assert "passages-ctx" in dump and key not in dump and bytes.fromhex(key).hex().upper() not in dump


def test_processes_that_make_the_key_at_once_agree(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / f"key{DRAFT}").write_text("half")  # left by a process that was killed
    start = threading.Barrier(8)

    def make(_: int) -> bytes:
        start.wait()
        return key_from_file(tmp_path / "new" / "key")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make, range(8)))) == 1
    assert {p.name for p in (tmp_path / "new").iterdir()} - {LOCK_FILE} == {"key"}


def test_the_given_key_comes_before_the_environments_and_that_before_the_files(
    store: SoftContextStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, 1)
    folder, bundle = tmp_path / "chroma", store.bundle
    monkeypatch.setenv(KEY_VARIABLE, "an environment's secret")
    reader = SoftContextStore(folder, bundle)
    # A program that has no secret may have made the file in the folder: what it signed is not read.
    with pytest.raises(PayloadError, match="another key"):
        reader.marker("p0", 8)
    with pytest.raises(StoreError, match="1 records.*CTX_COMPRESS_KEY"):
        reader.discard_damaged(other_keys=False)
    assert reader.discard_damaged() == ["p0"]
    add(reader, 1)
    assert SoftContextStore(folder, bundle, key=b"an environment's secret").marker("p0", 8) == reader.marker("p0", 8)
    assert SoftContextStore(folder, bundle, key=b"another secret of 26 bytes").damaged() == ["p0"]


@pytest.mark.parametrize(
    ("text", "mode"), [("zz", 0o600), ("ab", 0o600), ("", 0o600), ("ab" * 32, 0o644), (None, 0o700)]
)
def test_a_key_file_that_is_none_or_open_is_refused(tmp_path: Path, bundle: WordBundle, text: Any, mode: int) -> None:
    path = tmp_path / KEY_FILE
    path.mkdir() if text is None else path.write_text(text)
    path.chmod(mode)
    with pytest.raises(StoreError, match={0o644: "chmod 600", 0o700: "cannot use"}.get(mode, "damaged")):
        add(SoftContextStore(tmp_path, bundle), 1)


PASSAGES = [SIGNER.passage(f"passage {number}") for number in range(4)]
ISSUED = {
    who: [
        SIGNER.write(name, factor, slots, who, shown)
        for name in PASSAGES
        for factor, slots, shown in ((1, 24, None), (4, 6, None), (4, 6, 0), (1, 0, 57))
    ]
    + [SIGNER.write(SIGNER.transient("a question", name), 1, slots, who) for name in PASSAGES for slots in (0, 3)]
    for who in ("anna", "ben")
}
OTHERS = [
    signer.write(signer.passage("passage 0"), 1, 24, "anna")
    for signer in (Signer(b"x" * 32, SIGNER.fingerprint), Signer(b"K" * 32, SIGNER.fingerprint))
]

own = st.sampled_from(ISSUED["anna"])
issued = own | st.sampled_from(ISSUED["ben"] + OTHERS)
noise = st.text("[]ctx:.abp0169 \n{}<|>$%\\\"'", max_size=12) | st.text(max_size=8)
counts = st.integers(0, 10**8).map(str) | st.sampled_from(
    ["", "-1", "٣", "1e3", "007", "t", "6t", "24t0", "6tt", "6t0", "0t57", "6t057"]
)
letters = st.text("abcdefghijklmnop", min_size=16, max_size=20)
forged = st.builds("[[ctx:{}.{}.{}]]".format, letters, counts, letters)
exchanged = st.builds(
    lambda one, other: one[:26] + other[26:], issued, own
)  # the head of one marker, the rest of another


@st.composite
def edited(draw: st.DrawFn) -> str:
    """A marker with some of it replaced: by nothing, a character, noise, or another marker, maybe one that resolves."""
    text = draw(issued)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.sampled_from([0, 0, 1, 1, len(text)]))
        text = text[:start] + draw(st.just("") | st.characters() | noise | issued | forged) + text[end:]
    return text


attacks = st.lists(issued | forged | exchanged | edited() | noise | issued.map(str.upper), max_size=4).map("".join)
CHAT = (
    ("system", "Answer from the context.\n\nA first document.\n\n{}\n\nA last one."),
    ("user", 'search returned [{{"text": "{}", "score": 0.5}}]'),
    ("assistant", "I said: {}"),
    ("user", "{} What is this?"),
)


def resolved(parts: list[str | Marker]) -> Counter[tuple[str, str]]:
    return Counter(
        (p.id, f"{p.slots}" if p.shown is None else f"{p.slots}t{p.shown}") for p in parts if isinstance(p, Marker)
    )


def test_only_what_was_issued_to_the_scope_resolves(tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of hostile prompts, with attacks in the context, user text, history and a tool's output.

    What must resolve is found without the signer: by looking for the issued strings themselves.
    """
    expected_of = {marker: marker.removeprefix("[[ctx:").split(".") for marker in ISSUED["anna"]}

    @settings(max_examples=120)
    @given(st.tuples(*[attacks] * len(CHAT)))
    def attack(drawn: tuple[str, ...]) -> None:
        chat = [{"role": role, "content": frame.format(each)} for (role, frame), each in zip(CHAT, drawn, strict=True)]
        text = chat_text(tiny_tokenizer, chat)
        parts = SIGNER.split(text, "anna")
        # Issued strings cannot overlap, as each begins with [[ and ends with ]].
        expected = Counter({(id, slots): text.count(marker) for marker, (id, slots, _) in expected_of.items()})
        assert resolved(parts) == +expected
        # What does not resolve is all still there, in order; what is around a marker does not close up.
        literal = [part for part in parts if isinstance(part, str)]
        assert "".join(literal) == "".join(re.split("|".join(map(re.escape, expected_of)), text))
        assert not any(resolved(SIGNER.split(part, "anna")) for part in literal)

    with caplog.at_level(logging.ERROR):  # each refused marker is a warning
        attack()


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


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, SoftContextStore]]:
    """A folder and its store of p0 to p2, for tests that mend what they damage."""
    folder = tmp_path_factory.mktemp("mended")
    with SoftContextStore(folder, WordBundle(), key=KEY) as store:
        add(store, 3)
        yield folder, store


@pytest.mark.parametrize("name", DAMAGE)
def test_a_changed_record_is_refused_and_made_anew(mended: tuple[Path, SoftContextStore], name: str) -> None:
    folder, store = mended
    markers = [store.split(marker)[0] for marker in store.markers(["p0", "p1", "p2"], 4)]
    spoil(folder, name)
    if name in ("a payload cut short", "another passage's payload"):  # the text is still good
        assert store.get_passages(["p1"])[0].text == passage(1)
    reads: list[Callable[[], Any]] = [lambda: store.get(["p1"]), lambda: store.read(markers[:2])[1].soft]
    if name in ("a text that is none", "another passage's text alone"):  # which slots do without
        reads = [lambda: store.get_passages(["p1"])]
    for read in reads:
        with pytest.raises((PayloadError, KeyError), match="'p1' is damaged.*add it again|no passage"):
            read()
    assert_same(store.get(["p2"])[0], WordBundle().at(passage(2), 4))
    assert store.discard_damaged() == ["p1"]
    assert add(store, 3) == AddReport(added=1, updated=0, unchanged=2)
    assert_same(store.read(markers)[1].soft, WordBundle().at(passage(1), 4))
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
        left = mark_texts(store, [*texts, passage(9)], ["p0", "p1", "p2", "p9"], scope=scope, on_missing="text")
        assert [text.startswith("[[ctx:") for text in left] == [True, False, True, False]
        shown = mark_texts(store, texts, ["p0", "p1", "p2"], scope=scope)
        markers = [part for text in shown for part in store.split(text, scope)]
        assert [len(call) for call in bundle.calls] == [3, 1]
        assert_same(store.read(markers)[1].soft, bundle.at(passage(1), 4))
        assert store.get_passages(["p1"], scope)[0].metadata == {"page": 1}
        assert store.damaged() == ([] if scope == "default" else ["p1"])  # others' records are theirs to mend


def test_a_passage_that_another_deletes_while_it_is_marked_is_compressed_again(
    store: SoftContextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, 2)
    [before] = store.markers(["p0"], 4)
    look_up = store.stored_ids

    def deleted_afterwards(*args: Any) -> Any:
        found = look_up(*args)
        monkeypatch.undo()
        store.delete(["p0"])
        return found

    monkeypatch.setattr(store, "stored_ids", deleted_afterwards)
    assert mark_texts(store, [passage(0)], ["p0"]) == [before] and store.get(["p0"])[0] is not None


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
