"""`make campaign`: everything that breaks stores and fools readers, for an hour or `MINUTES=N`; a table of counts.

`python tests/campaign/run.py --minutes 60 --page docs/campaign.md`. The exit code is 1 where anything is counted that
must be zero.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
SHARES = {"kills": 0.4, "files": 0.08, "writers": 0.12, "records": 0.05, "markers": 0.22, "load": 0.13}
TITLES = {
    "kills": "Writers killed before a chosen call that writes to a file, and what a reader meets right after",
    "files": "A folder's files damaged at random",
    "writers": "Processes side by side on one folder",
    "records": "Fields of records changed behind the store's back",
    "markers": "Markers that were not issued to the reader",
    "load": "Threads and memory",
}
PAGE = """# Campaign

Stress tests of stores and markers, by one command: `make campaign MINUTES={minutes:g}` (an hour without `MINUTES`; seed
{seed}; Linux with a C compiler, for the kills). Each part runs in a process of its own, in `tests/campaign/`. This
table is from a run of {minutes:g} minutes on {machine}, which others used, too. Counts in bold must be zero.

{tables}
"""


@dataclass(frozen=True)
class Outcome:
    """What a part counted."""

    name: str
    counted: dict[str, int]
    faults: dict[str, int]

    def table(self) -> str:
        rows = [f"| {name} | {count:,} |" for name, count in self.counted.items()]
        rows += [f"| **{name}** | **{count:,}** |" for name, count in self.faults.items()]
        return "\n".join([f"## {TITLES[self.name]}", "", "| | |", "|---|---|", *rows])


def watched(folder: Path) -> dict[str, str]:
    """An environment whose processes can be killed at a chosen call."""
    library = folder / "kill_at.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("kill_at.c")), "-ldl"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}


def run(name: str, seconds: float, seed: int, env: dict[str, str]) -> Outcome:
    command = [sys.executable, "-m", f"campaign.{name}", str(seconds), str(seed)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    *said, last = done.stdout.splitlines()
    if said:
        print("\n".join(said), file=sys.stderr)
    return Outcome(name, **json.loads(last))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--page", type=Path, help="write the table here")
    args = parser.parse_args(arguments)
    paths = [str(TESTS), str(TESTS.parent), str(TESTS.parent / "integrations"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRANSFORMERS_VERBOSITY": "error"}
    env.pop("CTX_COMPRESS_KEY", None)
    end = time.monotonic() + 60 * args.minutes
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for place, name in enumerate(args.parts):
            more = watched(Path(folder)) if name == "kills" else {}
            # What parts before it left of their time is shared by those to come.
            share = SHARES[name] / sum(SHARES[later] for later in args.parts[place:])
            outcomes.append(run(name, max(0, end - time.monotonic()) * share, args.seed, env | more))
            print(outcomes[-1].table(), flush=True)
    if args.page:
        machine = f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()})"
        tables = "\n\n".join(outcome.table() for outcome in outcomes)
        page = PAGE.format(minutes=args.minutes, seed=args.seed, machine=machine, tables=tables)
        args.page.write_text(page, encoding="utf-8")
    return int(any(count for outcome in outcomes for count in outcome.faults.values()))


if __name__ == "__main__":
    sys.exit(main())
