"""Writers killed before each call that writes to files, one after the other; then a reader looks.

Needs `kill_at.c` compiled and in LD_PRELOAD, as `run.py` does it.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import signal
from collections import Counter
from pathlib import Path

from campaign import part
from campaign.folders import copies, in_child, job, looked_at

MOST = 1000
JOBS = ("add", "change", "delete")
COUNTED = [
    "kills at chosen calls",
    "write calls of the three jobs",
    "passages read right after",
    "passages met as missing",
]
FAULTS = ["errors right after", "passages lost", "passages read wrong", "passages not mended by the next retrieval"]


def run(seconds: float, seed: int) -> Counter[str]:
    found: Counter[str] = Counter()
    watch, more = ctypes.CDLL(None), part.Deadline(seconds)

    def work(folder: Path, kind: str, at: int) -> int:
        """Kill a job before its `at`-th call; how many calls it made where it lived."""

        def killed() -> int:
            watch.kill_at(at)
            job(folder, kind)
            return int(watch.calls_made())

        code, calls = in_child(killed)
        assert code == (-signal.SIGKILL if calls is None else 0), code
        return calls or 0

    with copies() as fresh:
        points = [(kind, at) for kind in JOBS for at in range(1, work(fresh(), kind, 0) + 1)]
        found["write calls of the three jobs"] = len(points)
        random.Random(seed).shuffle(points)
        for kind, at in itertools.cycle(points):
            if not more or found["kills at chosen calls"] == MOST:
                break
            folder = fresh()
            if work(folder, kind, at):
                continue  # it ended before, with fewer calls than the first time
            seen = looked_at(folder)
            found["kills at chosen calls"] += 1
            found["passages read right after"] += seen["read"]
            found["passages met as missing"] += seen["missing"]
            found["errors right after"] += sum(seen[name] for name in ("refused", "raw errors", "aborts", "crashes"))
            found["passages lost"] += seen["lost"]
            found["passages read wrong"] += seen["wrong"]
            found["passages not mended by the next retrieval"] += seen["not mended"]
    return found


if __name__ == "__main__":
    part.main(run, COUNTED, FAULTS)
