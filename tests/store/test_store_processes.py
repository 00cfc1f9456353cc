"""A SoftContextStore and other processes: locks, forks; `tests/cli` kills a write."""

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from ctx_compress_rag.errors import StoreLockedError, StoreWriteError
from ctx_compress_rag.store import AddReport, SoftContextStore
from ctx_compress_rag.store.collection import ChromaCollection
from ctx_compress_rag.store.key import KEY_FILE
from ctx_compress_rag.store.place import ACCESS_FILE, DRAFT, LOCK_FILE, TURN_FILE, StoreFolder, lock_store_folder
from helpers.forked import Forked, run_python
from helpers.store import WRITE, WordBundle, add, assert_same, passage


@contextmanager
def held_lock(folder: Path, name: str = LOCK_FILE) -> Iterator[None]:
    """Another process holds a lock: by default that of the writers' queue, as one does in the middle of a write."""
    code = """
import filelock, sys, time
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""
    with Forked(code, folder / name) as holder:
        assert holder.stdout.readline() == "held\n"
        yield


def test_writers_of_two_processes_take_turns(tmp_path: Path, bundle: WordBundle) -> None:
    code = f"""{WRITE}
store = SoftContextStore(sys.argv[1], WordBundle())
print(len(store), store.get(["p0"])[0] is not None, store.ensure([passage(0)], ["p0"]))
print(store.add([passage(7)], ["other"], progress=False))
"""
    with SoftContextStore(tmp_path, bundle) as store:
        add(store, 2)
        assert run_python(code, tmp_path).stdout.startswith("2 True ['p0']\nAddReport(added=1,")  # this one is open
        assert_same(store.get(["other"])[0], bundle.at(passage(7), 4))
        # A second store of this process writes along, also through a client and another spelling of the path.
        with SoftContextStore(tmp_path / ".." / tmp_path.name, bundle) as second:
            assert add(second, 1, start=5).added == 1
        assert add(store, 1, start=6).added == 1
        assert sorted(store.ids()) == ["other", "p0", "p1", "p5", "p6"]


def test_a_reader_does_without_the_lock_and_a_writer_waits_for_it(tmp_path: Path, bundle: WordBundle) -> None:
    with SoftContextStore(tmp_path, bundle, lock_timeout=0.2) as store:
        add(store, 2)
        bundle.calls.clear()
        with held_lock(tmp_path):
            assert_same(store.get(["p0"])[0], bundle.at(passage(0), 4))
            assert store.ensure([passage(0)], ["p0"]) == ["p0"]
            for refused in (lambda: add(store, 3), lambda: store.delete(["p0"])):
                began = time.monotonic()
                with pytest.raises(StoreLockedError, match=str(tmp_path)):
                    refused()
                assert 0.2 <= time.monotonic() - began < 5
            assert bundle.calls == []  # refused before the work
            assert store.delete(["none"]) == 0
        assert add(store, 3) == AddReport(added=1, updated=0, unchanged=2)


def test_a_reader_waits_for_the_write_in_progress_and_a_writer_for_no_new_readers(
    tmp_path: Path, bundle: WordBundle
) -> None:
    with SoftContextStore(tmp_path, bundle, read_timeout=0.3) as store:
        add(store, 1)
        for file in (ACCESS_FILE, TURN_FILE):  # an engine at work; a writer that waits for it to be done
            with held_lock(tmp_path, file), pytest.raises(StoreLockedError, match="reading or writing"):
                store.get(["p0"])
        assert_same(store.get(["p0"])[0], bundle.at(passage(0), 4))
        waiting = lock_store_folder(tmp_path / ACCESS_FILE)
        with waiting, ThreadPoolExecutor(1) as pool:
            written = pool.submit(add, store, 1, 1)
            with pytest.raises(StoreLockedError):  # once the writer waits, its turn comes first
                while not written.done():
                    with lock_store_folder(tmp_path / TURN_FILE, 0):
                        pass
                    time.sleep(0.005)  # longer than the writer's pause between two tries


def test_a_backup_waits_for_the_lock(tmp_path: Path, bundle: WordBundle) -> None:
    with SoftContextStore(tmp_path / "chroma", bundle) as store:
        add(store, 2)
    with held_lock(tmp_path / "chroma"), pytest.raises(StoreLockedError):
        StoreFolder(tmp_path / "chroma").back_up(tmp_path / "copy", timeout=0.1)
    (tmp_path / "chroma" / f"{KEY_FILE}{DRAFT}").write_text("of a process that was killed")
    StoreFolder(tmp_path / "chroma").back_up(tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").glob("ctx*")) == ["ctx-compress.generation", KEY_FILE]
    with SoftContextStore(tmp_path / "copy", bundle) as copy:
        assert all(copy.get(["p0", "p1"]))


@pytest.mark.parametrize("killed", [False, True])
def test_a_search_finds_what_others_have_written_since(tmp_path: Path, killed: bool) -> None:
    code = f"""{WRITE}
import os
from ctx_compress_rag.store.collection import ChromaCollection
from ctx_compress_rag.store.place import StoreFolder
folder = StoreFolder(__import__("pathlib").Path(sys.argv[1]))
with folder.writing(10) as client:
    client.get_collection("app").add(["new"], [[0.0, 1.0]], documents=["new"])
    if sys.argv[2] == "True":
        os._exit(0)
"""
    reader = ChromaCollection(StoreFolder(tmp_path), "app")
    reader.upsert(["old"], [[1.0, 0.0]], [{"n": 1}], ["old"])
    assert reader.query([[0.0, 1.0]], 1)[0][0][0] == "old" and not reader.interrupted()
    run_python(code, tmp_path, killed)
    assert reader.query([[0.0, 1.0]], 1)[0][0][0] == "new"
    assert reader.interrupted() == killed
    reader.delete(["old"])
    assert reader.interrupted() == killed  # until somebody has looked through the index
    reader.place.mended()
    assert not reader.interrupted()
    reader.close()


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("folder", ["chroma", "new/newer"])
def test_what_this_user_may_not_write_to_is_refused_with_the_way_out(bundle: WordBundle, folder: str) -> None:
    """Chroma's engine writes even when it reads, so another user's folder is reached through a server."""
    with tempfile.TemporaryDirectory() as closed:
        with SoftContextStore(os.path.join(closed, "chroma"), bundle, key=b"k" * 16) as store:
            add(store, 2)
        os.chmod(closed, 0o755)
        code = f"""{WRITE}
import os
from ctx_compress_rag.errors import StoreWriteError
bundle = WordBundle()
os.setuid(65534)
try:
    print(SoftContextStore(sys.argv[1], bundle, key=b"k" * 16).get(["p0"]))
except StoreWriteError as error:
    print("refused:", error)
"""
        run = run_python(code, os.path.join(closed, folder))
    assert run.stdout.startswith("refused:"), run
    assert ("chroma run" if folder == "chroma" else f"may not write to {closed}:") in run.stdout


@pytest.mark.parametrize("name", [LOCK_FILE, TURN_FILE, ACCESS_FILE, "ctx-compress.generation"])
def test_a_link_in_place_of_a_lock_file_is_not_followed(tmp_path: Path, bundle: WordBundle, name: str) -> None:
    """Who may write to the folder could have the store write into any file of its owner."""
    precious, folder = tmp_path / "precious", tmp_path / "chroma"
    precious.write_text("words")
    folder.mkdir()
    (folder / name).symlink_to(precious)
    with SoftContextStore(folder, bundle) as store, pytest.raises(StoreWriteError, match=f"(?i){name}.*symbolic link"):
        add(store, 1)
    assert precious.read_text() == "words"
