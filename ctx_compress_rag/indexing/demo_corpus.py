"""The demo's small corpora, with questions: paragraphs of Wikipedia, or the invented world's held-out part."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from benchmarks.world.wording import Kind
from benchmarks.world.world import Entity, World
from ctx_compress_rag.data.examples import Turn
from ctx_compress_rag.indexing.index import make_passage
from ctx_compress_rag.store import Passage

WORLDS = 5
TWO_PASSAGE_QUESTIONS = 4
QUESTIONS = 12
_WIKIPEDIA = Path(__file__).with_name("demo_passages.json")
_XQUAD = "Wikipedia's authors, as chosen for XQuAD, CC BY-SA 4.0"
_KINDS: tuple[Kind, ...] = ("person", "town", "organisation")


@dataclass(frozen=True)
class DemoQuestion:
    """A question, its accepted answers, and the ids of the passages that it needs."""

    text: str
    answers: tuple[str, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """Passages and questions, none of which a shipped bundle was trained on.

    Attributes:
        passages: to index.
        questions: to ask.
        retrieved: passages per prompt.
        shown: the ratio whose answers are shown.
        about: what the passages are.
        licence: authors and licence of the passages.
    """

    passages: tuple[Passage, ...]
    questions: tuple[DemoQuestion, ...]
    retrieved: int
    shown: int
    about: str
    licence: str


def wikipedia_corpus() -> Corpus:
    """Twenty-four paragraphs and twelve questions of XQuAD's English part (CC BY-SA 4.0). Always the same."""
    data = json.loads(_WIKIPEDIA.read_text(encoding="utf-8"))
    passages = tuple(make_passage(row["text"], row["title"], "demo") for row in data["passages"])
    questions = tuple(
        DemoQuestion(row["question"], tuple(row["answers"]), (str(passages[row["passage"]].id),))
        for row in data["questions"]
    )
    return Corpus(passages, questions, retrieved=2, shown=4, about="paragraphs of Wikipedia", licence=_XQUAD)


def invented_corpus() -> Corpus:
    """Forty passages and twelve questions, four of which need two passages. Always the same."""
    worlds = _worlds()
    passages = {entity.name: make_passage(entity.passage, entity.name, "demo") for w in worlds for entity in w.entities}
    asked: list[tuple[list[Entity], Turn]] = []
    for number in range(QUESTIONS - TWO_PASSAGE_QUESTIONS):
        world = worlds[number % WORLDS]
        entities = [world.entities[3 * number % len(world.entities)]]
        asked.append((entities, world.turns(entities)[0]))
    for number in range(TWO_PASSAGE_QUESTIONS):
        kind = _KINDS[number % len(_KINDS)]
        asked.append(_pair_question(worlds[number], kind))
    questions = [
        DemoQuestion(turn.question, turn.answers, tuple(str(passages[entity.name].id) for entity in entities))
        for entities, turn in asked
    ]
    return Corpus(
        tuple(passages.values()),
        tuple(questions),
        retrieved=4,
        shown=16,
        about="passages about unseen names",
        licence="invented, free to use",
    )


def _worlds() -> list[World]:
    """The first test worlds that share no name, since passages of the same name would contradict each other."""
    worlds: list[World] = []
    taken: set[str] = set()
    seed = 0
    while len(worlds) < WORLDS:
        world = World("test", seed)
        names = {entity.name for entity in world.entities}
        if not names & taken:
            worlds.append(world)
            taken |= names
        seed += 1
    return worlds


def _pair_question(world: World, kind: Kind) -> tuple[list[Entity], Turn]:
    """A question that names two entities of a kind; one retrieval step cannot find others."""
    pairs = list(permutations([entity for entity in world.entities if entity.kind == kind], 2))
    while True:  # `turns` draws again each time, and asks about a pair only sometimes
        for pair in pairs:
            for turn in world.turns(list(pair)):
                if all(entity.name in turn.question for entity in pair):
                    return list(pair), turn
