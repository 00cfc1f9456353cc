"""Files of questions."""

import json
from pathlib import Path

import pytest

from benchmarks.world.world import world_examples
from ctx_compress_rag.data.examples import read_jsonl, write_jsonl
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
        ('{"answers": ["a"], "context": "c"}', "question is missing"),
        ('{"question": "Q", "answers": ["a"]}', "context or passages are empty"),
        ("[1]", r"\[1\]"),
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ('{"question": 5, "answers": ["a"], "context": "c"}', "question: .*5"),
        ('{"question": "Q", "answers": [5], "context": "c"}', "answers.0: .*5"),
        ('{"question": "Q", "answers": "a", "context": "c"}', "answers: .*'a'"),
        ('{"question": "Q", "answers": [], "context": "c"}', "answers is empty: give one or more"),
        ('{"question": "Q", "answers": ["a"], "context": 5}', "context.*5"),
        ('{"question": "Q", "answers": ["a"], "context": ["c", " "]}', "context or passages are empty"),
        ('{"question": "Q", "answers": ["a"], "passages": []}', "context or passages are empty"),
        ('{"question": "Q", "answers": ["a"], "passages": ["c"]}', "passages.0: .*'c'"),
        (r'{"question": "Q", "answers": ["a"], "context": "cut emoji \ud83d"}', "JSON.*escape"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, said: str) -> None:
    good = json.dumps({"question": "Q", "answers": ["a"], "context": "c"})
    (tmp_path / "data.jsonl").write_text(f"{good}\n{row}\n")
    with pytest.raises(DataError, match=f"data.jsonl:2: .*{said}"):
        read_jsonl(tmp_path / "data.jsonl")


def test_a_file_that_is_no_jsonl_is_named(tmp_path: Path) -> None:
    row = '{"question": "Wo?", "answers": ["K\u00f6ln"], "context": "In K\u00f6ln."}'
    (tmp_path / "latin.jsonl").write_bytes(row.encode("latin-1"))
    (tmp_path / "packed.jsonl.gz").write_text(row)
    for name in ("latin.jsonl", "packed.jsonl.gz", "."):
        with pytest.raises(DataError, match="cannot read .* UTF-8"):
            read_jsonl(tmp_path / name)
    for encoding in ("UTF-16", "LATIN1"):  # as Python and iconv call them
        (tmp_path / "other.jsonl").write_text(row, encoding=encoding)
        with pytest.raises(DataError, match=f"iconv -f {encoding} -t UTF-8"):
            read_jsonl(tmp_path / "other.jsonl")
    (tmp_path / "bom.jsonl").write_text(row, encoding="utf-8-sig")  # as Windows writes it
    assert read_jsonl(tmp_path / "bom.jsonl")[0].passages == ("In K\u00f6ln.",)
