"""Several processes on one store folder, round after round: writers that keep their object, and readers."""

import logging
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FORKS: Any = multiprocessing.get_context("forkserver")
WRITERS, READERS, ADDS, EACH = 4, 4, 5, 13
STOP = "writers-are-done"
KEY = b"a key for the stress test"


def work(order: dict[str, Any]) -> dict[str, int]:
    """One process's part of a round."""
    from benchmarks.crashes.folders import app_collection, save, vectors_of
    from benchmarks.crashes.words import WORDS, passage
    from ctx_compress_rag.errors import StoreLockedError
    from ctx_compress_rag.store import SoftContextStore

    done: Counter[str] = Counter()
    rng, folder = random.Random(order["seed"]), Path(order["folder"])
    with (
        SoftContextStore(folder, WORDS, key=KEY, lock_timeout=rng.choice([0.0, 0.05, 5.0])) as store,
        app_collection(folder) as app,
    ):
        if order["role"] == "write":
            first = 1000 * order["number"]
            for start in range(first, first + ADDS * EACH, EACH):
                while True:
                    try:
                        save(folder, {f"p{i}": passage(i) for i in range(start, start + EACH)}, store)
                        break
                    except StoreLockedError:
                        done["locked"] += 1
                        time.sleep(rng.uniform(0, 0.02))
                done["written"] += EACH
                time.sleep(rng.uniform(0, 0.01))
        elif order["role"] == "read":
            while not (folder / STOP).exists():
                n = 1000 * rng.randrange(WRITERS) + rng.randrange(ADDS * EACH)
                [found] = store.get_passages([f"p{n}"])
                [soft] = store.get([f"p{n}"])
                assert found is None or found.text == passage(n)
                assert found is None or (soft is not None and soft.n_tokens == 30)
                done["read"] += 1
                done["found"] += found is not None
                hits = app.query(vectors_of([f"p{n}"]), 1)[0]
                done["searched"] += 1
                assert found is None or hits[0][0] == f"p{n}"  # vectors are written first
                time.sleep(rng.uniform(0, 0.01))
        else:
            ids = [f"p{1000 * w + i}" for w in range(WRITERS) for i in range(ADDS * EACH)]
            done["lost"] = sum(soft is None for soft in store.get(ids))
            done["extra"] = len(store) - len(ids)
            done["not searchable"] = len(app.unsearchable())
            done["usable"] = store.add([passage(7)], ["after"], progress=False).added
            done["slots"] = store.info().slots
    return done


def work_off(pipe: Any) -> None:
    """Work off the orders that come through a pipe, until there is none."""
    while order := pipe.recv():
        pipe.send(work(order))


class Worker:
    """A process that works off orders; a new one takes the place of one that died."""

    def __init__(self) -> None:
        self._pipe, end = FORKS.Pipe()
        self._process = FORKS.Process(target=work_off, args=(end,))
        self._process.start()
        end.close()

    def start(self, order: dict[str, Any]) -> None:
        """Give it an order."""
        self._pipe.send(order)

    def result(self) -> dict[str, int]:
        """What came of the order."""
        try:
            return dict(self._pipe.recv())
        except EOFError:
            self._process.join()
            logger.warning("a worker died with %s", self._process.exitcode)
            self.__init__()  # type: ignore[misc]
            return {"died": 1}

    def end(self) -> None:
        """Stop it."""
        self._pipe.send(None)
        self._process.join(60)


def rounds(count: int, seed: int = 0) -> dict[str, int]:
    """What happened in so many rounds, each in a folder of its own."""
    total: Counter[str] = Counter()
    workers = [Worker() for _ in range(WRITERS + READERS)]
    try:
        for turn in range(count):
            with tempfile.TemporaryDirectory() as folder:
                for n, worker in enumerate(workers):
                    role = "write" if n < WRITERS else "read"
                    order = {"role": role, "folder": folder, "number": n}
                    worker.start({**order, "seed": f"{seed}/{turn}/{n}"})
                results = [worker.result() for worker in workers[:WRITERS]]
                Path(folder, STOP).touch()
                results += [worker.result() for worker in workers[WRITERS:]]
                workers[-1].start({"role": "check", "folder": folder, "seed": "check"})
                results.append(workers[-1].result())
            for result in results:
                total.update(result)
            broken = any(r.get("died") for r in results) or results[-1].get("lost") or results[-1].get("usable") != 1
            total.update(rounds=1, broken=int(bool(broken)))
    finally:
        for worker in workers:
            worker.end()
    return dict(total)


def run(count: int) -> tuple[Counter[str], Counter[str]]:
    """So many rounds; what was counted, and what of it must be zero."""
    done = Counter(rounds(count))
    faults = Counter({name: done[name] for name in ("lost", "extra", "not searchable", "died", "broken")})
    faults["not written"] = count * WRITERS * ADDS * EACH - done["written"]
    return done - faults, faults
