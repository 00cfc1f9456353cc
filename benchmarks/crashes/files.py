"""Files of a folder damaged at random: bytes turned, ends cut, files gone; then a reader looks.

Where SQLite finds its file malformed, Chroma's engine may panic twice and abort the process, and a damaged file of its
index may crash it; no Python can catch that.
"""

import logging
import random
from collections import Counter
from pathlib import Path

from benchmarks.crashes.folders import copies, looked_at

logger = logging.getLogger(__name__)


def damage(folder: Path, rng: random.Random) -> str:
    """Damage a file; what was done."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    files.sort(key=lambda path: (path.name, path.stat().st_size))  # Chroma draws the names of its folders
    path = rng.choices(files, [path.stat().st_size for path in files])[0] if rng.random() < 0.6 else rng.choice(files)
    data = bytearray(path.read_bytes())
    kind = rng.choice(["turn", "turn", "turn", "zero", "cut", "gone"])
    match kind:
        case "turn":
            for _ in range(rng.choice([1, 16, 256])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case "zero":
            start = rng.randrange(len(data))
            end = min(len(data), start + 4096)
            data[start:end] = bytes(end - start)
        case "cut":
            del data[rng.randrange(len(data)) :]
        case "gone":
            path.unlink()
            return f"{path.name} gone"
    path.write_bytes(data)
    return f"{path.name} {kind}"


def run(count: int) -> tuple[Counter[str], Counter[str]]:
    """Damage so many folders; what was counted, and what of it must be zero."""
    counted, faults = Counter[str](), Counter[str]()
    rng = random.Random(0)
    with copies() as fresh:
        for _ in range(count):
            folder = fresh()
            done = damage(folder, rng)
            seen = looked_at(folder)
            if seen["raw errors"] or seen["crashes"]:
                logger.warning("after %s", done)
            counted["damaged folders"] += 1
            counted["read as if undamaged"] += bool(seen["read"]) and not (seen["missing"] or seen["wrong"])
            counted["refused with the library's own error"] += seen["refused"]
            counted["passages met as missing"] += seen["missing"]
            counted["processes that Chroma's engine aborted or crashed"] += seen["aborts"] + seen["crashes"]
            faults["passages read wrong"] += seen["wrong"]
            faults["raw errors"] += seen["raw errors"]
    return counted, faults
