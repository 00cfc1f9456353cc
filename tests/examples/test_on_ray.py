"""Compressing on the workers of a Ray cluster, on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import FingerprintMismatchError, WorkerError
from ctx_compress_rag.store import Passage, SoftContextStore
from ctx_compress_rag.store.key import KEY_VARIABLE
from helpers.cli import assert_same_contents, contents, write_docs
from ray_indexing.on_ray import fill_on_ray, store_dataset

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.slow  # a cluster takes half a minute to start


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def stored(folder: Path) -> int:
    client = chromadb.PersistentClient(str(folder))
    try:
        return int(client.get_collection("passages-ctx").count())
    except Exception:  # not made yet
        return 0
    finally:
        client.close()


def test_killed_and_run_again_it_compresses_only_what_is_missing(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "one key for both folders")
    docs = write_docs(tmp_path / "docs", files=40)
    command = [sys.executable, "-m", "ctx_compress_rag.cli", "index", str(docs), "--bundle", str(bundle_folder)]
    command += ["--chunk-tokens", "48", "--store"]
    target, killed = tmp_path / "killed", [*command, str(tmp_path / "killed"), "--ray", "2"]
    with subprocess.Popen(killed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not ((target / "chroma.sqlite3").exists() and stored(target)):
            time.sleep(0.2)
        process.kill()
    before = stored(target)
    done = subprocess.run(killed, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    [(added, unchanged)] = re.findall(r"(\d+) passages compressed, (\d+) unchanged", done.stdout)
    assert 0 < before == int(unchanged) and int(added) > 0
    whole = subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, text=True, timeout=400, check=True)
    assert f"{int(added) + int(unchanged)} passages compressed, 0 unchanged" in whole.stdout
    assert len(contents(target)) == int(added) + int(unchanged)
    assert_same_contents(target, tmp_path / "whole")


def test_a_dataset_goes_into_a_store_once(bundle_folder: Path, tmp_path: Path, cluster: None) -> None:
    rows = [{"id": f"p{n}", "text": f"Passage {n} says that the river runs south."} for n in range(40)]
    bundle = Bundle.from_pretrained(bundle_folder)
    with SoftContextStore(tmp_path / "chroma", bundle, codec="int4") as store:
        assert store_dataset(ray.data.from_items(rows), store, str(bundle_folder), 1) == 40
        store.delete(["p3", "p7"])
        assert store_dataset(ray.data.from_items(rows), store, str(bundle_folder), 1) == 2
        texts = [row["text"] for row in rows]
        assert all(store.has(texts, [row["id"] for row in rows]))
        with SoftContextStore(tmp_path / "here", bundle, codec="int4") as here:
            here.add([Passage(row["text"], row["id"]) for row in rows], progress=False)
            for one, other in zip(store.get(["p0", "p7"]), here.get(["p0", "p7"]), strict=True):
                assert one is not None and other is not None
                assert one.token_counts.tolist() == other.token_counts.tolist()
                assert (one.slots - other.slots).norm() < 0.02 * other.slots.norm()


def test_faults_of_workers_and_of_what_is_read_are_told(bundle_folder: Path, tmp_path: Path, cluster: None) -> None:
    bundle = Bundle.from_pretrained(bundle_folder)
    with SoftContextStore(tmp_path / "chroma", bundle) as store:
        rows = ray.data.from_items([{"id": "a", "text": "The river runs south."}])
        with pytest.raises(FingerprintMismatchError, match="give the workers the store's bundle"):
            store_dataset(rows, store, "demo", 1)
        with pytest.raises(WorkerError, match="no-such-bundle"):
            store_dataset(rows, store, str(tmp_path / "no-such-bundle"), 1)

        def broken() -> Iterator[Passage]:
            yield Passage("The river runs south.", "a")
            raise ValueError("the input broke off")

        class Target:
            def missing(self, passages: Any) -> list[Passage]:
                return list(passages)

            put = store.put

        with pytest.raises(ValueError, match="broke off"):
            list(fill_on_ray(Target(), broken(), 1, {"bundle": str(bundle_folder)}))
        assert len(store) == 0
