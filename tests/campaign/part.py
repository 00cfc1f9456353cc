"""What a part of the campaign is: counts, those of them that must be zero, and a time after which it ends."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence


class Deadline:
    """Says when a part's time is over."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __bool__(self) -> bool:
        return time.monotonic() < self._end


def main(run: Callable[[float, int], Counter[str]], counted: Sequence[str], faults: Sequence[str]) -> None:
    """Run a part as `python -m campaign.PART SECONDS SEED`; its last line of output is its counts as JSON."""
    found = run(float(sys.argv[1]), int(sys.argv[2]))
    unknown = set(found) - {*counted, *faults}
    assert not unknown, unknown
    print(json.dumps({"counted": {n: found[n] for n in counted}, "faults": {n: found[n] for n in faults}}))
