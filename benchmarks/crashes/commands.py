"""`python -m benchmarks.crashes.commands [PART [COUNT]]`: run a part of the laboratory, or all; print the counts."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.crashes import files, kills, stress

PARTS = {"kills": (kills.run, 1000), "stress": (stress.run, 200), "files": (files.run, 300)}


def watched(folder: str) -> dict[str, str]:
    """An environment whose processes can be killed at a chosen call."""
    library = os.path.join(folder, "kill_at.so")
    command = ["cc", "-shared", "-fPIC", "-o", library, str(Path(__file__).with_name("kill_at.c")), "-ldl"]
    subprocess.run(command, check=True)
    return {**os.environ, "LD_PRELOAD": library}


def main(part: str, count: int) -> int:
    """Run a part in this process; 1 if it counted anything that must be zero."""
    counted, faults = PARTS[part][0](count)
    for name, number in {**counted, **faults}.items():
        print(f"{part}: {name}: {number:,}{' (must be 0)' if name in faults else ''}", flush=True)
    return int(any(faults.values()))


if __name__ == "__main__":
    chosen = sys.argv[1:2] or list(PARTS)
    os.environ.pop("CTX_COMPRESS_KEY", None)
    if len(sys.argv) > 3:  # as started below
        sys.exit(main(chosen[0], int(sys.argv[2])))
    codes = []
    with tempfile.TemporaryDirectory() as place:
        for name in chosen:
            number = sys.argv[2] if len(sys.argv) > 2 else str(PARTS[name][1])
            env = watched(place) if name == "kills" else None
            codes.append(
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.crashes.commands", name, number, "here"], env=env
                ).returncode
            )
    sys.exit(max(codes))
