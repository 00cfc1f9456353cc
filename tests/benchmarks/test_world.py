"""The invented world and its task families: what they ask, and that training never has a test's."""

import random
import re
from collections import Counter
from typing import Any

from benchmarks.world.task_families import ENDS, FAMILIES, MARKS, draw, families
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


def test_the_answer_is_a_fact_of_the_passage_and_the_code_words_follow() -> None:
    """Of 16 families for tests and 16 for development; training has each word with 14 others."""
    for split, times in (("train", 14), ("dev", 1), ("test", 1)):
        words = Counter(word for family in families(split) for word in (family.mark, family.end))
        assert words == dict.fromkeys((*MARKS, *ENDS), times)
    for seed, family in enumerate(FAMILIES):
        drawn = draw(family, "train", random.Random(seed))
        value, ending = drawn.answer.rsplit(" in ", 1)
        assert ending == family.name
        whole = re.compile(rf"\b{re.escape(value)}\b")
        assert whole.search(drawn.passages[0]) and not whole.search(drawn.question)
