"""Four writers and four readers on one folder: nothing lost, nobody crashes, the folder can be used afterwards."""

from __future__ import annotations

import pytest

from helpers.stress import ADDS, EACH, WRITERS, rounds


@pytest.mark.slow
def test_two_hundred_rounds() -> None:
    count = 200
    done = rounds(count)
    assert done["broken"] == done.get("died", 0) == done.get("lost", 0) == done.get("extra", 0) == 0, done
    assert done["written"] == count * WRITERS * ADDS * EACH
    assert done["read"] > 0 and done["found"] > 0
