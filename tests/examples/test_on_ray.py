"""Compressing on the workers of a Ray cluster, on this machine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctx_compress_rag import Bundle, SoftContextStore

pytestmark = pytest.mark.slow  # a cluster takes half a minute to start


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """The package, with a cluster; importing it takes every other test run a second."""
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    found = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # workers import the example, too
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=found)
    yield ray
    ray.shutdown()


def test_a_dataset_goes_into_a_store_once(bundle_folder: Path, tmp_path: Path, ray: Any) -> None:
    from ray_indexing.on_ray import store_dataset

    rows = [{"id": f"p{n}", "text": f"Passage {n} says that the river runs south."} for n in range(100)]
    folder, dataset = tmp_path / "chroma", ray.data.from_items(rows)
    with SoftContextStore(folder, Bundle.from_pretrained(bundle_folder)) as store:
        assert store_dataset(dataset, str(folder), str(bundle_folder), 1) == 100
        store.delete(["p3", "p7"])
        assert store_dataset(dataset, str(folder), str(bundle_folder), 1) == 2
        ids = [row["id"] for row in rows]
        assert store.stored_ids([row["text"] for row in rows], ids) == ids
