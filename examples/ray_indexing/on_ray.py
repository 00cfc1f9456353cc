"""Compress on the workers of a Ray cluster, with Ray Data; one process writes the results."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ctx_compress_rag.errors import ConfigError, CtxCompressError
from ctx_compress_rag.store.passage import Passage
from ray_indexing.worker import CompressPassages

if TYPE_CHECKING:
    from ctx_compress_rag.store import SoftContextStore

_BLOCK_BYTES = 65_536
"""Size of the blocks in which Ray passes on a stream; its default, 128 MB, would take hours to compress."""


class WorkerError(CtxCompressError):
    """Ray workers did not return all passages. The returned ones are stored: call again to resume."""


def store_dataset(dataset: Any, store: SoftContextStore, bundle: str, workers: int, scope: str | None = None) -> int:
    """Compress a Ray dataset into a store; return how many passages were added.

    For passages that all workers can read, for example from `ray.data.read_parquet("s3://...")`: this process receives
    only what it stores. A passage whose id is stored already is skipped, whatever its text.

    Args:
        dataset: has the str columns `id` and `text`, each id once.
        store: where the passages are stored; only this process writes to it.
        bundle: the store's bundle, as a folder that all workers can read, a shipped name or a hub id.
        workers: number of workers; each loads the bundle, on its own GPU if the cluster has enough.
        scope: tenant or user that owns the passages.

    Raises:
        WorkerError: passages did not come back because a worker died or could not load the bundle.
    """
    ray = _started(workers)
    held = ray.put(frozenset(store.ids(scope)))
    todo = dataset.filter(lambda row: row["id"] not in ray.get(held)).select_columns(["id", "text"])
    done = 0
    try:
        for made in _made(todo, workers, {"bundle": bundle, "ratio": store.base_ratio, "codec": store.codec}):
            store.put(
                [Passage(str(text), str(id)) for id, text in zip(made["id"], made["text"], strict=True)], made, scope
            )
            done += len(made["id"])
    except ray.exceptions.RayError as error:
        raise WorkerError(f"a worker failed ({_last_line(error)}): fix that, then run again to resume") from error
    return done


def _started(workers: int) -> Any:
    if workers < 1:
        raise ConfigError(f"cannot compress on {workers} workers: give 1 or more")
    import ray
    import ray.data

    if not ray.is_initialized():
        # A local cluster needs a CPU for each worker, or Ray would wait forever.
        local = {"address": "local", "num_cpus": max(workers, os.cpu_count() or 1), "include_dashboard": False}
        found = "RAY_ADDRESS" in os.environ
        ray.init(logging_level=logging.WARNING, log_to_driver=False, **({} if found else local))
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context.target_max_block_size = _BLOCK_BYTES
    return ray


def _made(dataset: Any, workers: int, make: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The dataset's batches with the columns that workers added, in order of arrival."""
    import ray

    gpus = ray.cluster_resources().get("GPU", 0) >= workers
    compressed = dataset.map_batches(
        CompressPassages,
        fn_constructor_kwargs=dict(make),
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_gpus=1 if gpus else None,
    )
    return compressed.iter_batches(batch_size=None, prefetch_batches=1)  # type: ignore[no-any-return]


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
