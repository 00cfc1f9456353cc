"""Sixteen threads on one store and decoder against serial answers; then question after question, memory watched."""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import chromadb

from benchmarks.world.world import World
from campaign import part
from ctx_compress_rag import Bundle, SoftContextStore
from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.store.marker import scope
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, messages

THREADS, ORDERS, MOST, WARM_UP = 16, 64, 2000, 100
FLAT_MB = 32
COUNTED = [
    "answers of sixteen threads",
    "questions with memory watched",
    "resident memory after the first hundred, MB",
    "grown by the end, MB",
]
FAULTS = ["answers other than the serial ones", f"grown by more than {FLAT_MB} MB"]


class Order(NamedTuple):
    question: str
    passages: list[str]
    ratio: int | None
    scope: str


def memory() -> int:
    """Resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(seconds: float, seed: int) -> Counter[str]:
    found: Counter[str] = Counter()
    rng = random.Random(seed)
    worlds = [World("test", number) for number in range(4)]
    texts = [entity.passage for world in worlds for entity in world.entities]
    questions = [turn.question for world in worlds for turn in world.turns(world.entities)]
    bundle = Bundle.from_pretrained("demo")
    store = SoftContextStore(chromadb.EphemeralClient(), bundle, key=b"a key for the load")
    store.add(texts, progress=False)
    decoder = TransformersDecoder(bundle, store)

    def answer(order: Order) -> str:
        with scope(order.scope):
            shown = mark(store, order.passages, ratio=order.ratio) if order.ratio else order.passages
            chat = [dict(message) for message in messages(TEMPLATES[0], PASSAGE_SEPARATOR.join(shown), order.question)]
            return decoder.generate([chat], Sampling(max_new_tokens=8))[0].text

    def ordered() -> Order:
        ratio = rng.choice([None, 4, 8, 16, 32])
        return Order(rng.choice(questions), rng.sample(texts, rng.randint(1, 4)), ratio, rng.choice(["anna", "ben"]))

    orders = [ordered() for _ in range(ORDERS)]
    serial = [answer(order) for order in orders]
    more = part.Deadline(seconds / 4)
    with ThreadPoolExecutor(THREADS) as pool:
        while more:
            answers = list(pool.map(answer, orders))
            found["answers of sixteen threads"] += len(answers)
            found["answers other than the serial ones"] += sum(a != b for a, b in zip(answers, serial, strict=True))
    more, asked, before = part.Deadline(3 * seconds / 4), 0, memory()
    while asked < MOST and (more or asked <= WARM_UP):
        answer(ordered())
        asked += 1
        if asked == WARM_UP:
            before = memory()
    grown = (memory() - before) >> 20
    found["questions with memory watched"] = asked
    found["resident memory after the first hundred, MB"] = before >> 20
    found["grown by the end, MB"] = grown
    found[f"grown by more than {FLAT_MB} MB"] = int(grown > FLAT_MB)
    return found


if __name__ == "__main__":
    part.main(run, COUNTED, FAULTS)
