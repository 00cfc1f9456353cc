"""The markers of a SoftContextStore, and the keys that sign them."""

from __future__ import annotations

import sqlite3
import stat
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ctx_compress_rag.errors import ConfigError, MissingPassageError, PayloadError, RatioError, StoreError
from ctx_compress_rag.marking.mark import expand, mark
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.key import KEY_FILE, KEY_VARIABLE, key_from_file
from ctx_compress_rag.store.marker import scope
from ctx_compress_rag.store.passage import content_id
from helpers.forked import run_python
from helpers.store import WRITE, WordBundle, add, assert_same, passage

# Markers


@pytest.mark.parametrize("ratio", [4, 8, 12, 16, 28, 32, 400, 16384])
def test_a_marker_fetches_its_passage_at_its_ratio(store: SoftContextStore, bundle: WordBundle, ratio: int) -> None:
    texts = [passage(i, words) for i, words in enumerate((1, 4, 5, 17, 30, 37))]
    ids = store.ensure(texts)
    markers = store.markers(ids, ratio)
    assert markers == store.markers(ids, ratio)
    parts = store.split("Read: " + " and ".join(markers) + "?")
    found = parts[1::2]
    assert parts[::2] == ["Read: ", *[" and "] * 5, "?"]
    for marker, soft, text in zip(found, store.fetch(found), texts, strict=True):
        direct = bundle.at(text, ratio)
        assert marker.slots == soft.n_slots == direct.n_slots
        assert_same(soft, direct, tolerance=0.015)
    assert store.text_of(found) == texts
    assert store.fetch(found[::-1])[0].n_tokens == 37
    assert store.fetch([]) == store.text_of([]) == []


def test_one_passage_under_two_ids_has_one_marker(store: SoftContextStore) -> None:
    store.add([passage(0), passage(0)], ["a", "b"], progress=False)
    first, second = store.markers(["a", "b"], 8)
    assert first == second
    store.delete(["a"])
    (marker,) = store.split(first)
    assert store.text_of([marker, marker]) == [passage(0)] * 2


def test_a_marker_repeated_is_not_written_out_beyond_all_measure(store: SoftContextStore) -> None:
    """300 kB of markers stand for 180 MB of text."""
    long = passage(0) + " " * 30_000
    store.add([long], ["long"], progress=False)
    marker = store.marker("long", 8)
    many = f"{marker} " * 6_000
    for refused in (lambda: mark(store, [many], on_missing="error"), lambda: expand(store, many)):
        tracemalloc.start()
        with pytest.raises(ConfigError, match="6,000 markers .* are allowed"):
            refused()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 40e6
    with pytest.raises(ConfigError, match="1 markers .* are allowed"):
        mark(store, [marker] * 600, on_missing="error")
    assert expand(store, f"{marker} " * 3) == f"{long} " * 3
    assert mark(store, [marker] * 3, ratio=8) == [store.marker(content_id(long), 8)] * 3


def test_markers_of_other_tenants_and_stores_stay_text(store: SoftContextStore, tmp_path: Path) -> None:
    add(store, 1)
    mine = store.marker("p0", 8)
    theirs = store.marker("p0", 8, scope="theirs")
    with scope("theirs"):
        assert store.marker("p0", 8) == theirs
        assert store.split(mine) == [mine]
        assert len(store.fetch(store.split(theirs))) == 1
    assert store.split(theirs) == [theirs]
    assert store.split(theirs, scope="theirs") != [theirs]
    assert SoftContextStore(tmp_path / "chroma", store.bundle, scope="theirs").split(theirs) != [theirs]
    assert SoftContextStore(tmp_path / "elsewhere", store.bundle).split(mine) == [mine]


def test_a_marker_of_what_is_gone_is_a_clear_error(store: SoftContextStore) -> None:
    add(store, 2)
    parts = store.split("".join(store.markers(["p0", "p1"], 8)))
    store.delete(["p0"])
    store.add([passage(77)], ["p1"], progress=False)
    for read in (store.fetch, store.text_of):
        for marker in parts:
            with pytest.raises(MissingPassageError, match="retrieve again"):
                read([marker])
    with pytest.raises(MissingPassageError, match="'p0' is not stored"):
        store.markers(["p1", "p0"], 8)


@pytest.mark.parametrize("ratio", [0, -4, 2, 6, 4 * 4097])
def test_a_ratio_that_cannot_be_made_is_refused(store: SoftContextStore, ratio: int) -> None:
    add(store, 1)
    with pytest.raises(RatioError, match=f"ratio {ratio} .*multiple of 4"):
        store.marker("p0", ratio)


# Keys


def test_the_key_file_is_private_and_shared_by_processes(store: SoftContextStore, tmp_path: Path) -> None:
    add(store, 1)
    path = tmp_path / "chroma" / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code = f"{WRITE}print(SoftContextStore(sys.argv[1], WordBundle()).marker('p0', 8))"
    assert run_python(code, tmp_path / "chroma").stdout.strip() == store.marker("p0", 8)


def test_the_key_is_not_in_chroma(store: SoftContextStore, tmp_path: Path) -> None:
    add(store, 1)
    key = (tmp_path / "chroma" / KEY_FILE).read_text()
    dump = "\n".join(sqlite3.connect(tmp_path / "chroma" / "chroma.sqlite3").iterdump())
    assert "passages-ctx" in dump and key not in dump and bytes.fromhex(key).hex().upper() not in dump


def test_processes_that_make_the_key_at_once_agree(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def make(_: int) -> bytes:
        start.wait()
        return key_from_file(tmp_path / "new" / "key")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make, range(8)))) == 1
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["key"]


def test_environment_and_explicit_keys_come_first(
    store: SoftContextStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, 1)
    folder, bundle = tmp_path / "chroma", store.bundle
    from_file = store.marker("p0", 8)
    explicit = SoftContextStore(folder, bundle, key=b"an explicit secret")
    add(explicit, 1, start=1)
    explicit.discard_damaged()
    add(explicit, 1)
    by_argument = explicit.marker("p0", 8)
    monkeypatch.setenv(KEY_VARIABLE, "an environment's secret")
    reader = SoftContextStore(folder, bundle)
    # What another key signed is not read, and neither is what the file in the folder signed: a program that has no
    # secret may have made that file.
    with pytest.raises(PayloadError, match="another key"):
        reader.marker("p0", 8)
    with pytest.raises(StoreError, match="2 records.*CTX_COMPRESS_KEY"):
        reader.discard_damaged(other_keys=False)
    assert sorted(reader.discard_damaged()) == ["p0", "p1"]
    add(reader, 1)
    from_env = reader.marker("p0", 8)
    assert len({from_file, from_env, by_argument}) == 3
    assert SoftContextStore(folder, bundle, key=b"an environment's secret").marker("p0", 8) == from_env
    assert reader.text_of(reader.split(from_env)) == [passage(0)]
    assert reader.split(from_file) == [from_file]


@pytest.mark.parametrize(("content", "mode"), [("zz", 0o600), ("ab", 0o600), ("", 0o600), ("ab" * 32, 0o644)])
def test_a_damaged_or_open_key_file_is_refused(tmp_path: Path, bundle: WordBundle, content: str, mode: int) -> None:
    path = tmp_path / KEY_FILE
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(StoreError, match="chmod 600" if mode == 0o644 else "damaged"):
        add(SoftContextStore(tmp_path, bundle), 1)


def test_markers_written_here_are_read_by_id_and_others_by_name(tmp_path: Path) -> None:
    bundle = WordBundle()
    with SoftContextStore(tmp_path, bundle, key=b"k" * 16) as store:
        add(store, 3)
        written = store.markers(["p0", "p1"], 4)
        [first, second] = [store.split(each)[0] for each in written]
        assert_same(store.fetch([first])[0], bundle.at(passage(0), 4))
        store.add([passage(0)], ["copy"], progress=False)
        store.delete(["p0"])  # where it was is no longer where it is
        assert_same(store.fetch([first, second])[0], bundle.at(passage(0), 4))
        store.add([passage(7)], ["p1"], progress=False)  # another text under the id
        with pytest.raises(MissingPassageError):
            store.fetch([second])
    with SoftContextStore(tmp_path, bundle, key=b"k" * 16) as reader:
        assert_same(reader.fetch([first])[0], bundle.at(passage(0), 4))
