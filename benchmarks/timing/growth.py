"""How an index grows: `python -m benchmarks.timing.growth 1000 10000 50000`.

Passages have 12 made-up words and vectors of 32 numbers; what the bundle made of the first 250 stands for the others,
so that compressing takes no time. What is left is the store's own and Chroma's.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any, cast

import numpy as np

from benchmarks.crashes.words import passage
from benchmarks.world import BUNDLE
from ctx_compress_rag import Bundle
from ctx_compress_rag.indexing import index as indexing
from ctx_compress_rag.indexing.index import PassageIndex, inspect_index, make_passage

MADE, WORDS, FETCHED, ROUNDS, RATIO = 250, 12, 8, 50, 4


def ms(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Milliseconds that some work takes: by default of CPU, so that what else the machine does is not counted."""
    began = clock()
    work()
    return 1000 * (clock() - began)


def vectors(texts: Sequence[str], embedder: str) -> Any:
    """Random unit vectors in place of an embedder's."""
    drawn = np.random.default_rng(len(texts)).normal(size=(len(texts), 32)).astype("float32")
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def bundle_without_work() -> Bundle:
    """A bundle that compresses in no time."""
    bundle = Bundle.from_pretrained(str(BUNDLE))
    made = cycle(bundle.compress([passage(n, WORDS) for n in range(MADE)]))
    cast(Any, bundle).compress = lambda texts, ratio=None: list(islice(made, len(texts)))
    return bundle


def measure(folder: str, bundle: Bundle, count: int) -> dict[str, float]:
    """What an index of so many passages takes."""
    passages = [make_passage(passage(n, WORDS), f"file{n // 20}.txt", "/docs") for n in range(count)]

    def index() -> PassageIndex:
        return PassageIndex(folder, bundle, "demo", None, "none")

    with index() as opened:
        first = ms(lambda: list(opened.add(passages)))
    with index() as opened:
        found = {
            "passages": count,
            "index a passage (CPU ms)": first / count,
            "bytes a passage": (opened.store.info().disk_bytes or 0) / count,
            "again, nothing new (CPU ms)": ms(lambda: list(opened.add(passages))),
            "sources (CPU ms)": ms(lambda: opened.sources("/docs")),
            "info (CPU ms)": ms(lambda: inspect_index(folder)),
        }
        ids = opened.store.ids()[:: count // FETCHED][:FETCHED]
        written = opened.store.markers(ids, RATIO)
    with index() as opened:  # which has not seen the markers
        markers: Any = [part for each in written for part in opened.store.split(each)]
        found["first fetch of 8 (CPU ms)"] = ms(lambda: opened.store.fetch(markers))
        times = [ms(lambda: opened.store.fetch(markers), time.perf_counter) for _ in range(ROUNDS)]
        return found | {"fetch of 8 (ms)": statistics.median(times)}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cast(Any, indexing).passage_vectors = vectors
    without_work = bundle_without_work()
    for size in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as place:
            row = measure(place, without_work, int(size))
        logging.info(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
