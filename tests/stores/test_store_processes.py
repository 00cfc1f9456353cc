"""A SoftContextStore and other processes: kills, locks, forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ctx_compress_rag.errors import StoreLockedError
from ctx_compress_rag.stores import AddReport, SoftContextStore
from helpers.store import TESTS, WRITE, WordBundle, add, run_python


@pytest.fixture
def bundle() -> WordBundle:
    return WordBundle()


def test_kill_in_the_middle_loses_nothing_and_a_rerun_completes(tmp_path: Path, bundle: WordBundle) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    code = f"""{WRITE}
import os, signal
class Dying(WordBundle):
    def compress(self, texts, ratio=None):
        if len(self.calls) == 3:
            print(sum(map(len, self.calls)), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compress(texts, ratio)
SoftContextStore(sys.argv[1], Dying()).add([passage(i) for i in range(200)], [f"p{{i}}" for i in range(200)])
"""
    run = run_python(code, killed)
    assert run.returncode == -9
    with SoftContextStore(killed, bundle) as store, SoftContextStore(whole, bundle) as reference:
        survived = len(store)
        assert survived == int(run.stdout) < 200  # the batches that were written before the fourth
        assert add(store, 200) == AddReport(added=200 - survived, updated=0, unchanged=survived)
        add(reference, 200)
        ids = [f"p{i}" for i in range(200)]
        for one, other in zip(store.get(ids), reference.get(ids), strict=True):
            assert torch.equal(one.slots, other.slots)
        assert store.get_passages(ids) == reference.get_passages(ids)
        assert add(store, 200).unchanged == 200


def test_one_writer_and_any_reader(tmp_path: Path, bundle: WordBundle) -> None:
    code = f"""{WRITE}
from ctx_compress_rag.errors import StoreLockedError
store = SoftContextStore(sys.argv[1], WordBundle())
print(len(store), store.get(["p0"])[0] is not None, store.ensure([passage(0)], ["p0"]))
try:
    store.add([passage(7)], ["other"], progress=False)
except StoreLockedError as error:
    print("locked:", error)
"""
    with SoftContextStore(tmp_path, bundle) as store:
        add(store, 2)
        run = run_python(code, tmp_path)
        assert run.stdout.startswith(f"2 True ['p0']\nlocked: another process is writing to the store {tmp_path}"), run
        assert "chroma run" in run.stdout
        # A second store of this process writes along, also through a client and another spelling of the path.
        with SoftContextStore(tmp_path / ".." / tmp_path.name, bundle) as second:
            assert add(second, 1, start=5).added == 1
        assert add(store, 1, start=6).added == 1
        assert "locked" in run_python(code, tmp_path).stdout
    assert "locked" not in run_python(code, tmp_path).stdout
    assert sorted(SoftContextStore(tmp_path, bundle).ids()) == ["other", "p0", "p1", "p5", "p6"]


def test_a_dead_writers_lock_is_free(tmp_path: Path, bundle: WordBundle) -> None:
    code = f"""{WRITE}
import os, signal
SoftContextStore(sys.argv[1], WordBundle()).add([passage(0)], ["p0"], progress=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code, tmp_path).returncode == -9
    with SoftContextStore(tmp_path, bundle) as store:
        assert add(store, 2) == AddReport(added=1, updated=0, unchanged=1)


def test_a_store_carried_over_a_fork_says_so_and_keeps_the_lock(tmp_path: Path) -> None:
    code = f"""{WRITE}
import multiprocessing, subprocess
from ctx_compress_rag.errors import StoreError
store = SoftContextStore(sys.argv[1], WordBundle())
store.add([passage(0)], ["p0"], progress=False)
def child():
    try:
        store.get(["p0"])
    except StoreError as error:
        print("child:", error, flush=True)
process = multiprocessing.get_context("fork").Process(target=child)
process.start(); process.join(30)
print("exit", process.exitcode, flush=True)
other = "import sys; from filelock import FileLock; FileLock(sys.argv[1] + '/ctx-compress.lock').acquire(timeout=0)"
print("lock", "Timeout" in subprocess.run([sys.executable, "-c", other, sys.argv[1]],
      capture_output=True, text=True).stderr)
"""
    lines = run_python(code, tmp_path).stdout.splitlines()
    assert "before a fork" in lines[0] and "spawn" in lines[0]
    assert lines[1:] == ["exit 0", "lock True"]


def test_a_locked_store_refuses_before_compressing(tmp_path: Path, bundle: WordBundle) -> None:
    code = f"""{WRITE}
store = SoftContextStore(sys.argv[1], WordBundle())
store.add([passage(0)], ["p0"], progress=False)
print("ready", flush=True)
sys.stdin.read()
"""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        with SoftContextStore(tmp_path, bundle) as store:
            with pytest.raises(StoreLockedError, match=str(tmp_path)):
                add(store, 3)
            with pytest.raises(StoreLockedError):
                store.delete(["p0"])
            assert bundle.calls == []
            assert store.delete(["none"]) == 0
            writer.communicate()
            assert add(store, 3) == AddReport(added=2, updated=0, unchanged=1)
