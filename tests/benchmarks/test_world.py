"""The invented world and its task families: what they ask, and that training never has a test's."""

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.world import wording
from benchmarks.world.task_families import ENDS, FAMILIES, MARKS, draw, families, write_families
from benchmarks.world.world import World, split_of
from ctx_compress_rag.data.examples import read_jsonl


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


def test_written_families_have_names_of_their_split_alone(tmp_path: Path) -> None:
    compounds = {head + tail for heads, tails in wording.COMPOUNDS for head in heads for tail in tails}
    assert write_families(tmp_path, "test", 4) == 16
    for file in tmp_path.iterdir():
        for example in read_jsonl(file):
            words = {word.strip(".?,") for word in example.passages[0].split()}
            assert {split_of(word) for word in words & compounds} == {"test"}
            assert example.turns[0].answers[0].endswith(file.stem.replace("_", " "))
