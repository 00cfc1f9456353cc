"""The invented world, whose splits share nothing; published data sets, in small files of their form."""

import gzip
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.datasets.published import SETS
from benchmarks.world.task_families import ENDS, FAMILIES, MARKS, draw, families
from benchmarks.world.world import World
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


TEXT = "Brenmoor Light was built in 1874. Ada Quill drew it."
PAGES = [
    ["Brenmoor Light", ["Brenmoor Light was built in 1874.", " Ada Quill drew it."]],
    ["Ada Quill", ["Born 1840."]],
]
FACTS = [["Brenmoor Light", 1], ["Ada Quill", 0], ["Ada Quill", 7]]
BARE = [[title, [sentence.strip() for sentence in sentences]] for title, sentences in PAGES]  # as 2Wiki has them
WIKI = {"question": "Who drew it?", "answer": "Ada Quill", "context": PAGES, "supporting_facts": FACTS}
CTXS = [{"title": "Brenmoor Light", "text": TEXT}, {"title": "Tea", "text": "A drink."}]
GOLD = [page | {"isgold": page["title"] != "Tea"} for page in CTXS]
JOINED = ("Brenmoor Light\n" + TEXT, "Tea\nA drink.")
MUSIQUE = {
    "question": "Who drew it?", "answer": "Ada Quill", "answer_aliases": ["Quill"], "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Brenmoor Light", "paragraph_text": TEXT, "is_supporting": True},
        {"idx": 1, "title": "Tea", "paragraph_text": "A drink.", "is_supporting": False},
    ],
}  # fmt: skip
MRQA = {"context": TEXT, "qas": [
    {
        "question": "When?", "answers": ["1874", "in 1874"],
        "detected_answers": [{"text": "1874", "char_spans": [[28, 31]]}],
    },
]}  # fmt: skip


def lines(path: Path, *rows: Any) -> Path:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def squad(folder: Path) -> Path:
    qas = [
        {"id": "1", "question": " When was it built?", "answers": [{"text": "1874", "answer_start": 28}] * 2},
        {"id": "2", "question": "Who paid?", "answers": [], "is_impossible": True},
    ]
    article = {"title": "Brenmoor", "paragraphs": [{"context": TEXT, "qas": qas}]}
    (folder / "squad.json").write_text(json.dumps({"version": "1.1", "data": [article]}))
    return folder / "squad.json"


def news(folder: Path, source: str = "test.src.cleaned", target: str = "test.tgt") -> Path:
    (folder / source).write_text("One NEWLINE_CHAR more. ||||| Two. |||||\n")
    (folder / target).write_text("\u2013 Both.\n")
    return folder / source


def hub_form(pages: list[Any]) -> dict[str, Any]:
    """Columns of the pages and of FACTS, as in HotpotQA's rows on the hub."""
    columns = {"context": (("title", "sentences"), pages), "supporting_facts": (("title", "sent_id"), FACTS)}
    return {key: dict(zip(names, zip(*rows, strict=True), strict=True)) for key, (names, rows) in columns.items()}


# For each set: the file, and what its first question becomes: question, answers, passages, evidence.
WIKI_PASSAGES = ("Brenmoor Light\n" + TEXT, "Ada Quill\nBorn 1840.")
WIKI_ROW = ("Who drew it?", ("Ada Quill",), WIKI_PASSAGES, ("Ada Quill drew it.", "Born 1840."))
FILES: dict[str, Any] = {
    "squad": (squad, ("When was it built?", ("1874",), (TEXT,), ())),
    "hotpotqa": (lambda f: lines(f / "h.json", [WIKI]), WIKI_ROW),
    "hotpotqa_gold": (
        lambda f: lines(f / "h.json", [WIKI | hub_form([["Tea", ["A drink."]], *PAGES])]),
        WIKI_ROW,
    ),
    "2wikimultihopqa": (lambda f: lines(f / "2.json", [WIKI | {"context": BARE}]), WIKI_ROW),
    "musique": (
        lambda f: lines(f / "m.jsonl", MUSIQUE | {"answerable": False}, MUSIQUE),
        ("Who drew it?", ("Ada Quill", "Quill"), JOINED, (TEXT,)),
    ),
    "nq": (
        lambda f: lines(f / "nq.json", [{"question": "When?", "answers": ["1874"], "ctxs": GOLD}]),
        ("When?", ("1874",), JOINED, (TEXT,)),
    ),
    "triviaqa": (
        lambda f: lines(f / "t.jsonl", HUB["triviaqa"]),
        ("Who drew it?", ("Ada Quill", "Quill"), JOINED[:1], ()),
    ),
    "popqa": (
        lambda f: lines(f / "p.jsonl", {"question": "When?", "possible_answers": '["1874", "MD"]', "ctxs": CTXS}),
        ("When?", ("1874", "MD"), JOINED, ()),
    ),
    "bamboogle": (
        lambda f: lines(f / "b.jsonl", {"question": "When?", "answer": "1874", "ctxs": CTXS}),
        ("When?", ("1874",), JOINED, ()),
    ),
    "narrativeqa": (
        lambda f: lines(f / "n.jsonl", HUB["narrativeqa"]),
        ("Who drew it?", ("Ada Quill", "Ada, the keeper"), (TEXT,), ()),
    ),
    "mrqa": (
        lambda f: lines(f / "m.jsonl.gz", {"header": {"dataset": "NewsQA"}}, MRQA),
        ("When?", ("1874", "in 1874"), (TEXT,), ()),
    ),
    "multinews": (news, ("Summarize the documents.", ("Both.",), ("One \n more.", "Two."), ())),
}  # fmt: skip
HUB: dict[str, Any] = {
    "triviaqa": {
        "question": "Who drew it?", "answer": {"value": "Ada Quill", "aliases": ["Quill"]},
        "entity_pages": {"title": ["Brenmoor Light", "Gone"], "wiki_context": [TEXT, ""]},
        "search_results": {"title": [], "search_context": []},
    },
    "narrativeqa": {
        "document": {"summary": {"text": TEXT}},
        "question": {"text": "Who drew it?"},
        "answers": [{"text": "Ada Quill"}, {"text": "Ada, the keeper"}],
    },
}  # fmt: skip


def written(folder: Path) -> list[tuple[Any, ...]]:
    """What was written to `out.jsonl`: question, answers, passages and evidence of each row."""
    examples = read_jsonl(folder / "out.jsonl")
    return [(turn.question, turn.answers, e.passages, turn.evidence) for e in examples for turn in e.turns]


@pytest.mark.parametrize("name", SETS)
def test_a_published_file_becomes_rows(name: str, tmp_path: Path) -> None:
    made, expected = FILES[name]
    assert main(["data", name, str(made(tmp_path)), "--output", str(tmp_path / "out.jsonl")]) == 0
    assert written(tmp_path) == [expected]
