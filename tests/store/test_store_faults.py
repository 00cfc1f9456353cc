"""Interrupts, forks, other processes, removed folders, full disks: nothing is left locked, lost or unsaid."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import filelock
import pytest

from ctx_compress_rag.errors import StoreError, StoreLockedError, StoreWriteError
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.store import AddReport, SoftContextStore
from ctx_compress_rag.store.collection import ChromaCollection
from ctx_compress_rag.store.key import KEY_FILE
from ctx_compress_rag.store.place import (
    ACCESS_FILE,
    DRAFT,
    LOCK_FILE,
    TURN_FILE,
    StoreFolder,
    disk_fault,
    lock_store_folder,
)
from ctx_compress_rag.store.threads import caller_gone
from helpers.decoding import wait_for
from helpers.forked import Forked, run_python
from helpers.store import WRITE, WordBundle, add, assert_same, full_disk, passage


def interrupted(work: Callable[[], object], at: int) -> int:
    """Raise KeyboardInterrupt before the `at`-th instruction of this thread's work; how many instructions it ran."""
    ran = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal ran
        frame.f_trace_opcodes = True
        if event == "opcode":
            ran += 1
            if ran == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        assert at
    finally:
        sys.settrace(None)
    return ran


@pytest.mark.parametrize("call", ["add", "get", "ensure", "delete"])
def test_an_interrupt_at_any_instruction_leaves_nothing_locked(tmp_path: Path, bundle: WordBundle, call: str) -> None:
    with SoftContextStore(tmp_path, bundle, lock_timeout=20) as store:
        add(store, 3)
        work: dict[str, Callable[[int], object]] = {
            "add": lambda n: store.add([passage(n)], [f"p{n}"], progress=False),
            "get": lambda n: store.get(["p1"]),
            "ensure": lambda n: store.ensure([passage(n)], [f"p{n}"]),
            "delete": lambda n: store.delete([f"p{n - 1}"]),
        }
        length = interrupted(lambda: work[call](9), 0)
        for n, at in enumerate(sorted(random.Random(call).sample(range(1, length + 1), min(6, length))), start=10):
            interrupted(lambda n=n: work[call](n), at)  # type: ignore[misc]
            others = threading.Thread(target=lambda: add(store, 1), daemon=True)
            others.start()
            others.join(30)
            assert not others.is_alive(), f"another thread hangs after instruction {at} of {length}"
            assert_same(store.get(["p0"])[0], bundle.at(passage(0), 4))
            with filelock.FileLock(tmp_path / LOCK_FILE, timeout=10):
                pass
        assert store.damaged() == []


@pytest.fixture
def sigint() -> Iterator[None]:
    """Ctrl-C raises, even where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_add_stops_after_the_batch_and_is_resumed(tmp_path: Path, sigint: None) -> None:
    main, batches = threading.get_ident(), itertools.count()

    class Interrupted(WordBundle):
        def compress(self, texts: Any, ratio: int | None = None) -> Any:
            if next(batches) == 0:
                signal.pthread_kill(main, signal.SIGINT)
                wait_for(caller_gone)
            return super().compress(texts, ratio)

    texts = [passage(n, 700) for n in range(120)]
    with SoftContextStore(tmp_path, Interrupted()) as store:
        with pytest.raises(KeyboardInterrupt):
            store.add(texts, progress=False)
        report = store.add(texts, progress=False)  # waits for the batch that was begun
        assert report.unchanged > 0 and report.added > 0 and len(store) == 120


def test_what_was_begun_at_an_interrupt_is_finished_before_the_process_ends(tmp_path: Path) -> None:
    code = f"""{WRITE}
import os, signal, time
from ctx_compress_rag.store.threads import caller_gone
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow(WordBundle):
    def compress(self, texts, ratio=None):
        os.kill(os.getpid(), signal.SIGINT)
        while not caller_gone():
            time.sleep(0.01)
        time.sleep(0.3)  # meanwhile the process begins to end
        return super().compress(texts, ratio)
SoftContextStore(sys.argv[1], Slow()).add([passage(n, 700) for n in range(120)], progress=False)
"""
    # A fork would not end as Python does.
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, stderr=subprocess.PIPE)
    assert b"KeyboardInterrupt" in ended.stderr and ended.returncode == -signal.SIGINT
    with SoftContextStore(tmp_path, WordBundle()) as store:
        assert 0 < len(store) < 120


def test_without_a_thread_to_start_all_goes_on_in_the_callers(tmp_path: Path, bundle: WordBundle) -> None:
    before = threading.stack_size(1 << 50)  # more than any process has addresses for
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=print).start()
        with SoftContextStore(tmp_path, bundle) as store:
            assert add(store, 2).added == 2 and store.get(["p0"])[0] is not None
        with pytest.raises(StoreError, match="closed"):
            store.get(["p0"])
    finally:
        threading.stack_size(before)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_child_of_busy_threads_is_told_at_once_that_it_can_use_no_store(tmp_path: Path) -> None:
    """Neither one of its parent's nor one of its own; the parent goes on."""
    code = f"""{WRITE}
import os, threading, time
from pathlib import Path
from ctx_compress_rag.errors import StoreError
folder = Path(sys.argv[1])
opened = SoftContextStore(folder / "parent", WordBundle())
opened.add([passage(0)], ["p0"], progress=False)
stop = threading.Event()
def busy(n):
    with SoftContextStore(folder / str(n), WordBundle()) as store:
        while not stop.is_set():
            store.add([passage(1)], ["p"], progress=False); store.get(["p"]); store.delete(["p"])
threads = [threading.Thread(target=busy, args=(n,)) for n in range(3)]
[thread.start() for thread in threads]
time.sleep(0.5)
for turn in range(4):
    if not (child := os.fork()):
        import signal
        signal.alarm(10)  # what hangs is killed
        wrong = 2
        for use in (lambda: opened.get(["p0"]), lambda: SoftContextStore(folder / "own", WordBundle())):
            try:
                use()
            except StoreError as error:
                wrong -= "fork" in str(error) and "spawn" in str(error)
        os._exit(wrong)
    print(os.waitpid(child, 0)[1], flush=True)
    time.sleep(0.05)
stop.set()
print(opened.add([passage(1)], ["p1"], progress=False).added)
"""
    done = run_python(code, tmp_path)
    assert done.stdout.split() == ["0"] * 4 + ["1"], done


@pytest.mark.parametrize("gone", ["folder", "key"])
def test_what_is_written_after_a_removal_can_be_read_by_the_next_process(
    tmp_path: Path, bundle: WordBundle, gone: str
) -> None:
    folder = tmp_path / "chroma"
    with SoftContextStore(folder, bundle) as store:
        add(store, 2)
        [before] = store.markers(["p1"], 4)
        shutil.rmtree(folder) if gone == "folder" else (folder / KEY_FILE).unlink()
        assert store.get(["p0"])[0] is None or gone == "key"
        add(store, 4)
        [after] = store.markers(["p1"], 4)
        assert after == before
    code = f"""{WRITE}
store = SoftContextStore(sys.argv[1], WordBundle())
print(sum(soft is not None for soft in store.get([f"p{{n}}" for n in range(4)])), store.damaged())
"""
    assert run_python(code, folder).stdout == "4 []\n"


def test_another_key_file_under_an_open_store_is_noticed_at_the_next_write(tmp_path: Path, bundle: WordBundle) -> None:
    with SoftContextStore(tmp_path, bundle) as store:
        add(store, 1)
        (tmp_path / KEY_FILE).write_text("ab" * 32)
        for refused in (lambda: add(store, 2), lambda: store.ensure([passage(7)])):
            with pytest.raises(StoreError, match=f"{KEY_FILE}.*open the store again"):
                refused()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(place)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("this user cannot mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_on_a_full_disk_what_is_stored_is_read_and_the_rest_stays_text(
    small_disk: Path, bundle: WordBundle, caplog: pytest.LogCaptureFixture
) -> None:
    with SoftContextStore(small_disk / "chroma", bundle) as store:
        add(store, 20)
        with (small_disk / "fill").open("wb", buffering=0) as fill, pytest.raises(OSError, match="space"):
            while True:
                fill.write(bytes(4096))
        for refused in (lambda: add(store, 21), lambda: store.delete(["p1"])):
            with pytest.raises(StoreWriteError, match="make room"):
                refused()
        assert_same(store.get(["p1"])[0], bundle.at(passage(1), 4))
        texts = mark_texts(store, [passage(1), passage(77)], ["p1", "new"])
        assert texts == [store.marker("p1", 4), passage(77)] and "new" in caplog.text
        (small_disk / "fill").unlink()
        assert add(store, 21).added == 1


def test_when_others_fill_the_disk_during_a_write_reads_say_so_and_go_on_once_there_is_room(small_disk: Path) -> None:
    """Chroma has logged the records then, but has no room to apply its log, which it does before each read."""
    wide = WordBundle(base_ratio=1, dim=512)
    with SoftContextStore(small_disk / "chroma", wide, read_timeout=5) as store:
        add(store, 60)
        fill = small_disk / "fill"

        rows = [{"payload": "x" * 20_000}] * 250
        with (
            pytest.raises(StoreWriteError, match="make room"),
            StoreFolder(small_disk / "chroma").writing(30) as client,
        ):
            fill.write_bytes(bytes(shutil.disk_usage(small_disk).free - (6 << 20)))
            client.get_collection("passages-ctx").upsert([f"p{n}" for n in range(250)], [[0.0]] * 250, rows)
        for _ in range(3):
            with pytest.raises(StoreWriteError, match="make room"):
                len(store)
        fill.unlink()
        assert len(store) == 310 and add(store, 61).added == 1


def test_a_file_that_may_not_grow_is_a_fault_of_the_disk(tmp_path: Path) -> None:
    assert disk_fault(tmp_path) is None
    with full_disk(100_000):
        assert disk_fault(tmp_path) == "File too large"


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
    tmp_path: Path, bundle: WordBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SoftContextStore(tmp_path, bundle) as store:
        add(store, 1)
        for file in (ACCESS_FILE, TURN_FILE):  # an engine at work; a writer that waits for it to be done
            with held_lock(tmp_path, file), monkeypatch.context() as patched:
                patched.setattr(store._records, "_read_timeout", 1.0)  # not while it opens, on a busy machine
                with pytest.raises(StoreLockedError, match="reading or writing"):
                    store.get(["p0"])
        assert_same(store.get(["p0"])[0], bundle.at(passage(0), 4))
        with ThreadPoolExecutor(1) as pool, lock_store_folder(tmp_path / ACCESS_FILE):
            written = pool.submit(store._records.check_writable)
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
    with pytest.raises(StoreError, match="check its disk"):
        StoreFolder(tmp_path / "chroma").back_up(tmp_path / "copy" / KEY_FILE / "copy")
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
