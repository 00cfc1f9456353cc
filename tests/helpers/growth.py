"""How `info`, `sources` and indexing again what is known grow with an index.

`PYTHONPATH=tests python tests/helpers/growth.py 1000 10000` prints it for indexes of so many passages. They have 30
words and vectors of 32 numbers, and the bundle takes no time: what is left is the store's own. Then the time in which 8
passages are fetched, checked against their seals, beside Chroma's own for the same records.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from ctx_compress_rag.app.passage_index import PassageIndex, inspect_index, make_passage
from ctx_compress_rag.bulk import worker
from helpers.store import WordBundle, passage

FETCHED, PAIRS = 8, 200


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def median_ms(times: Sequence[float]) -> str:
    return f"{1000 * statistics.median(times):.1f} ms"


def vectors(texts: Sequence[str], embedder: str) -> Any:
    rng = np.random.default_rng(len(texts))
    drawn = rng.normal(size=(len(texts), 32)).astype("float32")
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def measure(count: int) -> None:
    passages = [make_passage(passage(n), f"file{n // 20}.txt", "/docs") for n in range(count)]
    with tempfile.TemporaryDirectory() as folder:

        def index() -> PassageIndex:
            return PassageIndex(folder, cast(Any, WordBundle()), "words", None, "none")

        with index() as opened:
            first = seconds(lambda: opened.add(passages, progress=False))
        with index() as opened:
            print(f"{count} passages: indexed in {first:.0f} s", end="")
            print(f", again in {seconds(lambda: opened.add(passages, progress=False)):.2f} s", end="")
            print(f", sources {seconds(lambda: opened.sources('/docs')):.2f} s", end="")
            print(f", info {seconds(lambda: inspect_index(folder)):.2f} s", end="")
            print(f", {(opened.store.info().disk_bytes or 0) / count:.0f} bytes a passage", end="")
            fetch(opened)


def fetch(index: PassageIndex) -> None:
    ids, store = index.store.ids()[:: max(1, len(index.store) // FETCHED)][:FETCHED], index.store
    markers = cast(Any, [part for each in store.markers(ids, 4) for part in store.split(each)])
    with store._companion._reading() as raw:
        checked, plain = [], []
        for _ in range(PAIRS):
            checked.append(seconds(lambda: store.fetch(markers)))
            plain.append(seconds(lambda: raw.get(ids=ids, include=["metadatas"])))
    print(f", fetch of {FETCHED} {median_ms(checked)} (Chroma alone {median_ms(plain)})")


if __name__ == "__main__":
    worker.passage_vectors = vectors
    for each in sys.argv[1:]:
        measure(int(each))
