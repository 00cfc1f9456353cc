"""Files of questions and texts: what is read of them, held out and mixed."""

import json
import lzma
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.world.world import world_examples
from ctx_compress_rag.data.examples import SUMMARY_REQUEST, Example, Turn, read_jsonl, text_examples, write_jsonl
from ctx_compress_rag.data.held_out import HeldOut
from ctx_compress_rag.data.mixing import MixData, mix_examples
from ctx_compress_rag.errors import ConfigError, DataError
from ctx_compress_rag.text.answers import NO_ANSWER, normalize_answer
from ctx_compress_rag.training.prompts import load_training_examples, load_training_texts
from ctx_compress_rag.training.run import parse_recipe
from helpers.training import settings_of


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
    (tmp_path / "data.jsonl").write_text(f"{good}\n\n{row}\n")
    with pytest.raises(DataError, match=f"data.jsonl:3: .*{said}"):
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


# From XQuAD (CC BY-SA 4.0): a question and the beginning of its paragraph.
QUESTION = "How many points did the Panthers defense surrender?"
PARAGRAPH = (
    "The Panthers defense gave up just 308 points, ranking sixth in the league, while also leading the NFL in "
    "interceptions with 24 and boasting four Pro Bowl selections. Pro Bowl defensive tackle Kawann Short led the team "
    "in sacks with 11, while also forcing three fumbles and recovering two. Fellow lineman Mario Addison added 6½ "
    "sacks. The Panthers line also featured veteran defensive end Jared Allen, a 5-time pro bowler who was the NFL's "
    "active career sack leader with 136, along with defensive end Kony Ealy, who had 5 sacks in just 9 starts."
)
EXAMPLES = world_examples("train", 3, 60, max_turns=2, passages=(1,))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def row(context: str, question: str = "Which?", answer: str = "that") -> dict[str, Any]:
    return {"context": context, "question": question, "answers": [answer]}


def test_training_leaves_out_held_out_questions_and_passages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However they are written, and whatever stands around them; and a log message counts them."""
    good = [row(e.passages[0], e.turns[0].question) for e in EXAMPLES]
    question = row("Another text.", QUESTION.upper().replace("?", " ?"))
    passage = row(f"{EXAMPLES[0].passages[0]} {PARAGRAPH.replace(',', ' -')} {EXAMPLES[1].passages[0]}")
    text = tmp_path / "text.txt"
    text.write_text(f"{'Nothing of it. ' * 20}\n{PARAGRAPH}\n")
    data = {
        "files": [str(write(tmp_path / "train.jsonl", [*good, question, passage, row("word " * 1001)]))],
        "most_words": 1000,
        "texts": [{"file": str(text), "words": 40}],
        "held_out": [str(write(tmp_path / "dev.jsonl", [row(PARAGRAPH, QUESTION)]))],
    }
    recipe: Any = parse_recipe(settings_of(tmp_path, "packed", tmp_path, data=data), "here")
    assert {e.passages for e in load_training_examples(recipe) if e.turns[0].question} == {
        (each["context"],) for each in good
    }
    [kept] = load_training_texts(recipe)
    assert "Panthers" not in kept.passages[0]
    assert "train.jsonl: 2 of 62" in caplog.text and "text.txt: 1 of 2" in caplog.text


def test_held_out_text_is_found_and_nothing_else() -> None:
    passages = [" ".join(e.passages) for e in world_examples("test", 1, 40, max_turns=1, passages=(2,))]
    held_out = HeldOut([Example((p,), (Turn(f"Who of {i}?", ()),)) for i, p in enumerate(passages)])
    for passage in passages:
        words = passage.split()
        assert held_out.has_passage(passage.upper())
        assert held_out.has_passage(f"Before it. {' '.join(words[5:36])} And after.")
        assert not held_out.has_passage(" ".join(random.Random(0).sample(words, len(words))))
        assert not held_out.has_passage(" ".join(words[:12]))
    assert held_out.has_question("who of 3") and not held_out.has_question("Who of 41?")
    assert held_out.without(EXAMPLES, "here") == EXAMPLES
    assert held_out.without([Example((passages[0],), EXAMPLES[0].turns)], "here") == []
    assert len(held_out.without([Example((passages[0],), EXAMPLES[0].turns)], "here", passages=False)) == 1


def test_requests_for_summaries_and_blank_questions_may_be_shared() -> None:
    """All rows of MultiNews have the one, rows of plain text the other; their documents are held out all the same."""
    for question in (SUMMARY_REQUEST, " "):
        one, other = (
            Example((text,), (Turn(question, ("x",)),)) for text in ("Kormoor is old.", "Pell trades in salt.")
        )
        assert HeldOut([other]).without([one, other], "here") == [one]


def test_a_text_file_is_read_whole_packed_or_not(tmp_path: Path) -> None:
    lines = [f"Line {i} of the text, with words {'x' * (i % 50)}." if i % 7 else "" for i in range(3000)]
    text = "\n".join(lines)
    (tmp_path / "a.txt").write_text(f"\ufeff{text}", encoding="utf-8")
    with lzma.open(tmp_path / "a.txt.xz", "wt", encoding="utf-8") as packed:
        packed.write(text)
    for name in ("a.txt", "a.txt.xz"):
        rows = text_examples(tmp_path / name, words=40)
        assert "\n".join(r.passages[0] for r in rows).split() == text.split()
        assert all(40 <= len(r.passages[0].split()) < 60 for r in rows[:-1])
        assert {r.turns for r in rows} == {(Turn("", ("",)),)}


@pytest.mark.parametrize(
    ("name", "content"), [("b.txt.xz", b"no xz"), ("b.pdf", b""), ("b.txt", b"\xff\xfe\xff"), ("b.txt", b" ")]
)
def test_a_text_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        text_examples(tmp_path / name, 10)
    with pytest.raises(DataError, match="no data file"):
        text_examples(tmp_path / "missing.txt", 10)
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match=r"cannot read .*folder\.txt"):
        text_examples(tmp_path / "folder.txt", 10)


def test_texts_are_for_stages_without_questions(tmp_path: Path) -> None:
    settings = {"stage": "answer", "output": "o", "name": "n", "bundle": "b", "data": {"texts": [{"file": "a.txt"}]}}
    with pytest.raises(ConfigError, match="stage answer needs questions"):
        parse_recipe(settings, "here")
    (tmp_path / "a.txt").write_text("One line of text.\n" * 30)
    settings |= {"stage": "next_token", "data": {"texts": [{"file": str(tmp_path / "a.txt"), "words": 9}]}}
    assert len(load_training_examples(parse_recipe(settings, "here"))) == 10  # type: ignore[arg-type]


def test_rows_of_titled_passages_and_without_answers(tmp_path: Path) -> None:
    titled = {
        "question": "Q",
        "answers": [],
        "passages": [{"title": "T", "text": "One."}, {"title": "U", "text": "Two."}],
    }
    file = write(tmp_path / "dev.jsonl", [titled])
    assert read_jsonl(file, unanswerable=True) == [Example(("T\nOne.", "U\nTwo."), (Turn("Q", ()),))]
    with pytest.raises(DataError, match="answers"):
        read_jsonl(file)


SHORT = [
    Example((f"Sentence number {i} says a{i}.",), (Turn(f"Q{i}", (f"a{i}",), evidence=("says",)),)) for i in range(80)
]
LONG = [Example((f"Long {i}. " + "word " * 60 + f"b{i}.",), (Turn(f"P{i}", (f"b{i}",)),)) for i in range(50)]


@pytest.mark.parametrize("seed", range(3))
def test_mixed_prompts_hold_their_answers_or_say_that_they_do_not(seed: int) -> None:
    config = MixData(shortest=20, longest=40, passages=[1, 2, 4], near=0.5, unanswerable=0.3)
    mixed = mix_examples([SHORT, LONG], config, seed, block=8)
    assert (
        mixed
        == mix_examples([SHORT, LONG], config, seed, block=8)
        != mix_examples([SHORT, LONG], config, seed + 9, block=8)
    )
    assert sorted(e.turns[0].question for e in mixed) == sorted(e.turns[0].question for e in SHORT + LONG)
    right = {e.turns[0].question: e for e in SHORT + LONG}
    declined, places = 0, set()
    for example in mixed:
        [turn] = example.turns
        source = right[turn.question]
        text = normalize_answer(" ".join(example.passages)).split()
        if turn.answers == (NO_ANSWER,):
            declined += 1
            assert not turn.evidence
            assert normalize_answer(source.turns[0].answers[0]) not in text
        else:
            assert turn.answers == source.turns[0].answers
            [place] = [i for i, p in enumerate(example.passages) if source.passages[0] in p]
            places.add(place)
        if turn.question[0] == "P":  # of the file whose passages are not padded
            others = [int(i) for i in re.findall(r"Long (\d+)", " ".join(example.passages))]
            assert all(abs(i - int(turn.question[1:])) <= 30 for i in others)
        assert all(20 <= len(p.split()) <= 70 for p in example.passages)
        assert len(set(example.passages)) == len(example.passages)
    assert 0.2 < declined / len(mixed) < 0.4
    assert {len(e.passages) for e in mixed} == {1, 2, 4} and places == {0, 1, 2, 3}


def test_without_settings_mixing_only_changes_the_order() -> None:
    mixed = mix_examples([SHORT, LONG], MixData(), 0, block=4)
    assert sorted(mixed, key=str) == sorted(SHORT + LONG, key=str)
    assert mixed != SHORT + LONG
    spans = [
        max(lengths) - min(lengths)
        for i in range(0, 128, 4)
        for lengths in [[len(e.passages[0]) for e in mixed[i : i + 4]]]
    ]
    assert np.mean(spans) < 20  # of lengths from 25 to 310
