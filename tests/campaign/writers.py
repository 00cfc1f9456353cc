"""Four writers and four readers on one folder, round after round: `helpers.stress`, by time."""

from __future__ import annotations

from collections import Counter

from campaign import part
from helpers.stress import rounds

COUNTED = ["rounds of four writers and four readers", "passages written", "reads", "writes that had to wait"]
FAULTS = ["passages lost", "passages too many", "processes that died", "rounds after which the folder was no good"]


def run(seconds: float, seed: int) -> Counter[str]:
    more, done = part.Deadline(seconds), Counter[str]()
    while more:
        done.update(rounds(2, seed=seed + done["rounds"]))
    found = (done["rounds"], done["written"], done["read"], done["locked"])
    wrong = (done["lost"], done["extra"], done["died"], done["broken"])
    return Counter(dict(zip((*COUNTED, *FAULTS), found + wrong, strict=True)))


if __name__ == "__main__":
    part.main(run, COUNTED, FAULTS)
