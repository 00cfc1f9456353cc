"""Files of a folder damaged at random: bytes turned, ends cut, files gone; then a reader looks.

Where SQLite finds its file malformed, Chroma's engine may panic twice and abort the process; no Python can catch that.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

from campaign import part
from campaign.folders import copies, looked_at

COUNTED = [
    "damaged folders",
    "read as if undamaged",
    "refused with the library's own error",
    "passages met as missing",
    "processes that Chroma's engine aborted",
]
FAULTS = ["passages read wrong", "raw errors", "crashes"]


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


def run(seconds: float, seed: int) -> Counter[str]:
    found: Counter[str] = Counter()
    more, rng = part.Deadline(seconds), random.Random(seed)
    with copies() as fresh:
        while more:
            folder = fresh()
            done = damage(folder, rng)
            seen = looked_at(folder)
            if seen["raw errors"] or seen["crashes"]:
                print("after", done, file=sys.stderr)
            found["damaged folders"] += 1
            found["read as if undamaged"] += bool(seen["read"]) and not (seen["missing"] or seen["wrong"])
            found["refused with the library's own error"] += seen["refused"]
            found["passages met as missing"] += seen["missing"]
            found["passages read wrong"] += seen["wrong"]
            found["raw errors"] += seen["raw errors"]
            found["processes that Chroma's engine aborted"] += seen["aborts"]
            found["crashes"] += seen["crashes"]
    return found


if __name__ == "__main__":
    part.main(run, COUNTED, FAULTS)
