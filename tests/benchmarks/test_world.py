"""The invented world."""

from __future__ import annotations

from typing import Any

from benchmarks.world.world import World


def test_splits_of_the_world_share_no_name() -> None:
    """Names are what tells facts apart, so no passage or question of one split can be of another."""

    def roots(split: Any) -> set[str]:
        # The compound part of a name is its last word (people, towns) or its first (organisations).
        names = [e for seed in range(150) for e in World(split, seed).entities]
        return {n.name.split()[0] if n.kind == "organisation" else n.name.split()[-1] for n in names}

    train, dev, test = roots("train"), roots("dev"), roots("test")
    assert not train & test and not train & dev and not dev & test
    assert min(len(train), len(dev), len(test)) > 50
