"""The invented world."""

from __future__ import annotations

from typing import Any

from benchmarks.world.wording import COMPOUNDS
from benchmarks.world.world import World, world_examples


def test_splits_of_the_world_share_no_name() -> None:
    """Names are what tells facts apart, so no passage or question of one split can be of another."""

    def roots(split: Any) -> set[str]:
        # The compound part of a name is its last word (people, towns) or its first (organisations).
        names = [e for seed in range(150) for e in World(split, seed).entities]
        return {n.name.split()[0] if n.kind == "organisation" else n.name.split()[-1] for n in names}

    train, dev, test = roots("train"), roots("dev"), roots("test")
    assert not train & test and not train & dev and not dev & test
    assert min(len(train), len(dev), len(test)) > 50


def test_worlds_of_one_kind_are_as_many_as_asked_for() -> None:
    """In a prompt of such a world all passages are about one kind of thing, so that only names tell them apart."""
    kinds = [{head + tail for head in heads for tail in tails} for heads, tails in COMPOUNDS]

    def alike(passages: tuple[str, ...]) -> bool:
        """Whether the first sentences, which name what a passage is about, can all be of one kind."""
        words = [{word.rstrip(".") for word in passage.split(". ")[0].split()} for passage in passages]
        return any(all(w & names for w in words) for names in kinds)

    def share(wanted: float) -> float:
        drawn = world_examples("train", 7, 400, alike=wanted)
        return sum(alike(e.passages) for e in drawn) / len(drawn)

    assert share(1.0) == 1.0
    assert share(0.0) < 0.1
    assert 0.4 < share(0.5) < 0.65
    assert world_examples("train", 7, 8) == world_examples("train", 7, 8, alike=0.0)
