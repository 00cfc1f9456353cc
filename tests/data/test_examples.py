"""Files of questions, the guard of held-out sets, the invented world."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.datasets.held_out import HeldOut
from benchmarks.world.wording import COMPOUNDS
from benchmarks.world.world import World, world_examples
from ctx_compress_rag.data.examples import (
    SUMMARY_REQUEST,
    Example,
    Turn,
    check_held_out,
    read_jsonl,
    write_jsonl,
)
from ctx_compress_rag.errors import DataError


def test_jsonl_round_trip_and_grouping(tmp_path: Path) -> None:
    examples = world_examples("dev", 1, 4, max_turns=3)
    rows = write_jsonl(tmp_path / "data.jsonl", examples)
    assert rows == sum(len(e.turns) for e in examples)
    assert read_jsonl(tmp_path / "data.jsonl", max_turns=3) == examples
    assert len(read_jsonl(tmp_path / "data.jsonl")) == rows


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"answers": ["a"], "context": "c"}', 'there is no "question" in it: give question, answers and context'),
        ('{"question": "Q", "answers": ["a"]}', 'there is no "context" in it: give question, answers and context'),
        ("[1]", "[1] is not an object: give one with question, answers and context"),
        ("{", "this is not JSON (Expecting "),
        ("[" * 100_000, "this is not JSON (maximum recursion"),
        ('{"question": 5, "answers": ["a"], "context": "c"}', "question=5: give a string"),
        ('{"question": "Q", "answers": [5], "context": "c"}', "answers=[5]: give a list of strings"),
        ('{"question": "Q", "answers": "a", "context": "c"}', "answers='a': give a list of strings"),
        ('{"question": "Q", "answers": [], "context": "c"}', "answers is empty: give one or more"),
        ('{"question": "Q", "answers": ["a"], "context": 5}', "context=5: give a string or a list of strings"),
        ('{"question": "Q", "answers": ["a"], "context": []}', "context is empty, or a passage in it: give one"),
        ('{"question": "Q", "answers": ["a"], "context": ["c", " "]}', "context is empty, or a passage in it: give"),
        ('{"question": "Q", "answers": ["a"], "passages": []}', "passages is empty, or a passage in it: give one"),
        ('{"question": "Q", "answers": ["a"], "passages": ["c"]}', "passages=['c']: give objects with title and text"),
        (r'{"question": "Q", "answers": ["a"], "context": "cut emoji \ud83d"}', "half of a surrogate pair is not a"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, said: str) -> None:
    good = json.dumps({"question": "Q", "answers": ["a"], "context": "c"})
    (tmp_path / "data.jsonl").write_text(f"{good}\n{row}\n")
    with pytest.raises(DataError, match=re.escape(f"data.jsonl:2: {said}")):
        read_jsonl(tmp_path / "data.jsonl")


def test_a_file_that_is_no_jsonl_is_named(tmp_path: Path) -> None:
    row = '{"question": "Wo?", "answers": ["K\u00f6ln"], "context": "In K\u00f6ln."}'
    (tmp_path / "latin.jsonl").write_bytes(row.encode("latin-1"))
    (tmp_path / "packed.jsonl.gz").write_text(row)
    for name in ("latin.jsonl", "packed.jsonl.gz", "."):
        with pytest.raises(DataError, match="cannot read .* give a file of JSONL in UTF-8, gzipped or not"):
            read_jsonl(tmp_path / name)
    for encoding in ("UTF-16", "LATIN1"):  # as Python and iconv call them
        (tmp_path / "other.jsonl").write_text(row, encoding=encoding)
        with pytest.raises(DataError, match=f"iconv -f {encoding} -t UTF-8"):
            read_jsonl(tmp_path / "other.jsonl")
    (tmp_path / "bom.jsonl").write_text(row, encoding="utf-8-sig")  # as Windows writes it
    assert read_jsonl(tmp_path / "bom.jsonl")[0].passages == ("In K\u00f6ln.",)


def test_held_out_passages_and_questions_never_reach_training() -> None:
    held_out = world_examples("test", 0, 8)
    check_held_out(world_examples("train", 0, 200), held_out)
    with pytest.raises(DataError, match="^the training data contains a held-out passage: .*; remove it$"):
        check_held_out([*world_examples("train", 0, 3), held_out[3]], held_out)
    with pytest.raises(DataError, match="passage"):  # typed off
        check_held_out([replace(held_out[3], passages=(held_out[3].passages[0].upper() + "\n",))], held_out)
    check_held_out([Example(held_out[3].passages, (Turn("Another question?", ("yes",)),))], held_out, passages=False)
    question = Example(("Another text.",), held_out[3].turns)
    with pytest.raises(DataError, match="question"):
        check_held_out([*world_examples("train", 0, 3), question], held_out, passages=False)


def test_a_request_for_a_summary_is_no_held_out_question() -> None:
    """All rows of MultiNews have it; their documents are held out all the same."""
    asked = Turn(SUMMARY_REQUEST, ("A summary.",))
    train, test = (Example((text,), (asked,)) for text in ("Kormoor lies on the Halen.", "Pell trades in salt."))
    check_held_out([train], [test])
    assert not HeldOut.of([test]).shares(train)
    with pytest.raises(DataError, match="passage"):
        check_held_out([test], [test])
    assert HeldOut.of([test]).shares(test)


def test_passages_without_questions_share_none() -> None:
    """Rows of texts, and of reconstruction, have a blank question each."""
    rows = [Example((text,), (Turn(" ", (text,)),)) for text in ("Kormoor lies on the Halen.", "Pell trades in salt.")]
    check_held_out(rows[:1], rows[1:])
    with pytest.raises(DataError, match="passage"):
        check_held_out(rows, rows[1:])


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
