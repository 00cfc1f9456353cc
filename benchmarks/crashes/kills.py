"""Writers killed before each call that writes to files, one after the other; then a reader looks.

Needs `kill_at.c` compiled and in LD_PRELOAD, as `__main__.py` does it.
"""

import ctypes
import itertools
import random
import signal
from collections import Counter
from pathlib import Path

from benchmarks.crashes.folders import copies, in_child, job, looked_at

JOBS = ("add", "change", "delete")


def run(count: int) -> tuple[Counter[str], Counter[str]]:
    """Kill so many writers; what was counted, and what of it must be zero."""
    counted, faults = Counter[str](), Counter[str]()
    watch = ctypes.CDLL(None)

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
        counted["write calls of the three jobs"] = len(points)
        random.Random(0).shuffle(points)
        for kind, at in itertools.cycle(points):
            if counted["kills at chosen calls"] == count:
                break
            folder = fresh()
            if work(folder, kind, at):
                continue  # it ended before, with fewer calls than the first time
            seen = looked_at(folder)
            counted["kills at chosen calls"] += 1
            counted["passages read right after"] += seen["read"]
            counted["passages met as missing"] += seen["missing"]
            counted["passages that search missed, and the folder says so"] += seen["missed"] - seen["missed unsaid"]
            faults["passages that search missed, and nothing says so"] += seen["missed unsaid"]
            faults["passages that search misses after mending"] += seen["not searchable again"]
            faults["passages read of others"] += seen["of others"]
            faults["errors right after"] += sum(seen[name] for name in ("refused", "raw errors", "aborts", "crashes"))
            faults["passages lost"] += seen["lost"]
            faults["passages read wrong"] += seen["wrong"]
            faults["passages not mended by the next retrieval"] += seen["not mended"]
    return counted, faults
