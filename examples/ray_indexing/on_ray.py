"""Compress passages on the workers of a Ray cluster, with Ray Data, into one store."""

from collections.abc import Mapping
from typing import Any

import chromadb

from ctx_compress_rag import Bundle, SoftContextStore

_BATCH = 64


class AddPassages:
    """A worker with its own bundle and its own connection to the store."""

    def __init__(self, location: str, bundle: str, scope: str | None) -> None:
        host, colon, port = location.rpartition(":")
        place = chromadb.HttpClient(host, int(port)) if colon else None
        self._store = SoftContextStore(place or location, Bundle.from_pretrained(bundle))
        self._scope = scope

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Store the passages with these `id`s and `text`s; return how many were new or changed."""
        texts, ids = map(str, batch["text"]), list(map(str, batch["id"]))
        done = self._store.add(texts, ids, progress=False, scope=self._scope)
        return {"stored": [done.added + done.updated]}


def store_dataset(dataset: Any, location: str, bundle: str, workers: int, scope: str | None = None) -> int:
    """Compress a Ray dataset into a store; return how many passages were new or changed.

    For passages that all workers can read, for example from `ray.data.read_parquet("s3://...")`. If a worker fails,
    what is stored stays, and the same call resumes.

    Args:
        dataset: has the str columns `id` and `text`, each id once.
        location: `HOST:PORT` of a Chroma server, with the same CTX_COMPRESS_KEY on all machines; or, if all workers are
            on this machine, a folder.
        bundle: a folder that all workers can read, a shipped name or a hub id.
        workers: number of workers; each loads the bundle, on its own GPU if the cluster has enough.
        scope: tenant or user that owns the passages; None means the store's default.

    Raises:
        ray.exceptions.RayError: a worker failed; its cause says why.
    """
    import ray
    import ray.data

    ray.init(ignore_reinit_error=True)
    stored = dataset.map_batches(
        AddPassages,
        fn_constructor_args=(location, bundle, scope),
        batch_size=_BATCH,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_gpus=1 if ray.cluster_resources().get("GPU", 0) >= workers else None,
    )
    return sum(int(row["stored"]) for row in stored.iter_rows())
