"""Clients at a time against `ctx-compress serve` in a process of its own: none is dropped, and memory stays."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from helpers.load import load
from helpers.serving import ANNA, serving

FLAT_MB = 32


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_sixty_four_clients_for_two_minutes_in_flat_memory(index: Path) -> None:
    sizes: list[int] = []
    ended = threading.Event()
    with serving(index) as (process, url):

        def watch() -> None:
            while not ended.wait(1):
                sizes.append(resident(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            found = asyncio.run(load(url, "tiny", clients=64, seconds=120, key=ANNA))
        finally:
            ended.set()
            watcher.join()
    quarter = len(sizes) // 4
    before, after = max(sizes[quarter : 2 * quarter]), max(sizes[-quarter:])
    print(f"{dict(found.answered)}; {before >> 20} MB, at the end {after >> 20} MB")
    found.check(64)
    assert (after - before) >> 20 < FLAT_MB


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
