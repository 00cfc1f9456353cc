"""Compressing on the workers of a Ray cluster, on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import FingerprintMismatchError
from ctx_compress_rag.store import Passage, SoftContextStore
from ray_indexing.on_ray import WorkerError, store_dataset

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.slow  # a cluster takes half a minute to start


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


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


def test_faults_of_workers_are_told(bundle_folder: Path, tmp_path: Path, cluster: None) -> None:
    bundle = Bundle.from_pretrained(bundle_folder)
    with SoftContextStore(tmp_path / "chroma", bundle) as store:
        rows = ray.data.from_items([{"id": "a", "text": "The river runs south."}])
        with pytest.raises(FingerprintMismatchError, match="give the workers the store's bundle"):
            store_dataset(rows, store, "smollm2-135m", 1)
        with pytest.raises(WorkerError, match="no-such-bundle"):
            store_dataset(rows, store, str(tmp_path / "no-such-bundle"), 1)
        assert len(store) == 0
