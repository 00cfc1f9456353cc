"""How indexing, the folder, fetching and the first token grow with an index; `info` and indexing again, too.

`PYTHONPATH=tests python tests/helpers/growth.py docs/growth.png 1000 10000 50000` prints it for indexes of so many
passages, and plots it. Passages have 12 made-up words and vectors of 32 numbers. The bundle is `demo`; what it made of
the first 250 passages stands for the others, so that compressing takes no time. What is left is the store's own and
Chroma's, which is also timed alone, as it writes the same records into an empty folder. Then 8 passages are fetched and
checked against their seals, beside Chroma's own `get` of the same records, and a prompt with them is answered up to its
first token, at 4x.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from typing import Any, cast

import chromadb
import numpy as np

from ctx_compress_rag import Bundle
from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
from ctx_compress_rag.evaluation.figures import new_figure, save
from ctx_compress_rag.indexing import index as passage_index
from ctx_compress_rag.indexing.index import PassageIndex, inspect_index, make_passage
from helpers.store import passage

EVERYTHING = ["embeddings", "metadatas", "documents"]
MADE, WORDS, FETCHED, ROUNDS, RATIO = 250, 12, 8, 100, 4
PLOTTED = ("index a passage (CPU ms)", "bytes a passage", "fetch of 8 (ms)", "first token (ms)")


CPU = time.process_time  # of all threads: what is done once must not count what else the machine does
Work = dict[str, Callable[[], object]]


def ms(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    work()
    return 1000 * (clock() - began)


def vectors(texts: Sequence[str], embedder: str) -> Any:
    rng = np.random.default_rng(len(texts))
    drawn = rng.normal(size=(len(texts), 32)).astype("float32")
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def bundle_without_work() -> Bundle:
    bundle = Bundle.from_pretrained("demo")
    made = cycle(bundle.compress([passage(n, WORDS) for n in range(MADE)]))
    cast(Any, bundle).compress = lambda texts, ratio=None: list(islice(made, len(texts)))
    return bundle


def chroma_alone(folder: str, batch: int = 250) -> float:
    """Milliseconds a passage to write an index's records into an empty Chroma folder, in batches like `index`."""
    source = chromadb.PersistentClient(folder)
    spent = 0.0
    with tempfile.TemporaryDirectory() as empty:
        client = chromadb.PersistentClient(empty)
        for collection in source.list_collections():
            copy = client.create_collection(collection.name, embedding_function=None)
            count = collection.count()
            for start in range(0, count, batch):
                records = cast(Any, collection.get(limit=batch, offset=start, include=EVERYTHING))
                spent += ms(partial(copy.upsert, records["ids"], *(records[part] for part in EVERYTHING)), CPU)
    return spent / count


def indexed(folder: str, bundle: Bundle, count: int, stack: ExitStack) -> tuple[dict[str, float], Work]:
    """Milliseconds and bytes of an index, by what they are of; and what is to be timed beside the other indexes."""
    passages = [make_passage(passage(n, WORDS), f"file{n // 20}.txt", "/docs") for n in range(count)]

    def index() -> PassageIndex:
        return PassageIndex(folder, bundle, "demo", None, "none")

    with index() as opened:
        first = ms(lambda: list(opened.add(passages)), CPU)
    with index() as opened:
        found = {
            "passages": count,
            "index a passage (CPU ms)": first / count,
            "bytes a passage": (opened.store.info().disk_bytes or 0) / count,
            "again, nothing new (CPU ms)": ms(lambda: list(opened.add(passages)), CPU),
            "sources (CPU ms)": ms(lambda: opened.sources("/docs"), CPU),
            "info (CPU ms)": ms(lambda: inspect_index(folder), CPU),
        }
        ids = opened.store.ids()[:: count // FETCHED][:FETCHED]
        written = opened.store.markers(ids, RATIO)
    store = stack.enter_context(index()).store  # which has not seen the markers
    markers = cast(Any, [part for each in written for part in store.split(each)])
    found["first fetch of 8 (CPU ms)"] = ms(lambda: store.fetch(markers), CPU)
    found["of it Chroma (CPU ms)"] = chroma_alone(folder)  # last: an app's own engine makes looks go through Chroma
    raw = chromadb.PersistentClient(folder).get_collection("passages-ctx", embedding_function=None)
    decoder = TransformersDecoder(bundle, store)
    prompt = [{"role": "user", "content": " ".join(written) + "\n\nWho?"}]
    return found, {
        "fetch of 8 (ms)": lambda: store.fetch(markers),
        "Chroma's own part (ms)": lambda: raw.get(ids=ids, include=["metadatas"]),
        "first token (ms)": lambda: decoder.generate([prompt], Sampling(max_new_tokens=1)),
    }


def measure(sizes: Sequence[int]) -> list[dict[str, float]]:
    bundle = bundle_without_work()
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in sizes]
        made = [indexed(folder, bundle, count, stack) for folder, count in zip(folders, sizes, strict=True)]
        # In turn, so that a machine that is shared is as busy for one as for the other.
        rounds = [[[ms(each) for each in work.values()] for _, work in made] for _ in range(ROUNDS)]
        for (found, work), times in zip(made, zip(*rounds, strict=True), strict=True):
            found |= dict(zip(work, map(statistics.median, zip(*times, strict=True)), strict=True))
        return [found for found, _ in made]


def plot(path: str, rows: Sequence[dict[str, float]]) -> None:
    figure = new_figure(10, 2.6)
    for axes, name in zip(figure.subplots(1, len(PLOTTED)), PLOTTED, strict=True):
        axes.plot([row["passages"] for row in rows], [row[name] for row in rows], "o-")
        axes.set(xscale="log", xlabel="passages", title=name)
        axes.set_ylim(0, 1.2 * max(row[name] for row in rows))
        axes.grid(alpha=0.3)
    save(figure, path)


if __name__ == "__main__":
    passage_index.passage_vectors = vectors
    measured = measure([int(size) for size in sys.argv[2:]])
    for row in measured:
        print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    plot(sys.argv[1], measured)
