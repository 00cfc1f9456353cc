"""Task families of the invented world: questions with one of forty conventions for their answers.

A prompt has two passages about things of one kind, which state the same two facts, and asks for one fact of
one of them. How the answer is to be given no prompt says: about the thing that was asked for, or about the
other one; with its name, twice, or bare; after which words. Demonstrations of the same family show it.

Families differ between training and test. Every part of a convention occurs in training, and so does every
pair of parts; a test family is a combination of three that training never had. Conventions are such that
exact match and F1 can tell them apart: case, punctuation and articles they could not.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from ctx_compress_rag.adaptation.demonstrations import Demonstration
from ctx_compress_rag.demo import wording
from ctx_compress_rag.demo.world import Entity, Split, World
from ctx_compress_rag.errors import DataError

Content = Literal["asked", "other"]
Echo = Literal["value", "name and value", "value and name", "value twice"]

CONTENTS: tuple[Content, ...] = ("asked", "other")
ECHOES: tuple[Echo, ...] = ("value", "name and value", "value and name", "value twice")
# Words that the demo's decoder has met; their tokens are not at stake.
LEADS = ("", "known as", "this is", "answer", "in the world")

_KINDS: tuple[wording.Kind, ...] = ("person", "town", "organisation")
_FACTS = 2


@dataclass(frozen=True)
class Family:
    """A convention for answers.

    Attributes:
        content: whose fact is given: the thing asked for, or the other thing in the prompt.
        echo: what stands beside the value.
        lead: words that the answer begins with.
    """

    content: Content
    echo: Echo
    lead: str

    @property
    def name(self) -> str:
        """The convention in a few words."""
        return ", ".join(
            part for part in (f"{self.content} one's", self.echo, self.lead and f"{self.lead!r} first") if part
        )

    @property
    def split(self) -> Split:
        """Which split it belongs to: of the five leads of each content and echo, three train, one dev, one test."""
        place = 2 * CONTENTS.index(self.content) + ECHOES.index(self.echo) + LEADS.index(self.lead)
        return "test" if place % 5 == 3 else "dev" if place % 5 == 4 else "train"

    def answer(self, name: str, value: str) -> str:
        """The answer that gives `value`, a fact of the thing called `name`."""
        body = {
            "value": value,
            "name and value": f"{name} {value}",
            "value and name": f"{value} {name}",
            "value twice": f"{value} and {value}",
        }[self.echo]
        return f"{self.lead} {body}".strip()


FAMILIES = tuple(Family(*parts) for parts in product(CONTENTS, ECHOES, LEADS))


def families(split: Split) -> tuple[Family, ...]:
    """The families of a split."""
    return tuple(family for family in FAMILIES if family.split == split)


def check_families(training: Iterable[Family], held_out: Iterable[Family]) -> None:
    """Refuse training families that are held out.

    Raises:
        DataError: naming the first shared family.
    """
    shared = sorted({family.name for family in training} & {family.name for family in held_out})
    if shared:
        raise DataError(f"a held-out task family would be trained on: {shared[0]}")


def draw(family: Family, split: Split, rng: random.Random) -> Demonstration:
    """A question of a family with its passages and its answer; names are of `split` (see `demo.world`)."""
    while True:
        world = World(split, rng.randrange(1 << 40))
        kind = rng.choice(_KINDS)
        asked, other = rng.sample([entity for entity in world.entities if entity.kind == kind], 2)
        attributes = rng.sample(wording.ATTRIBUTES[kind], _FACTS)
        fact = attributes[0]
        if asked.facts[fact.name] != other.facts[fact.name]:
            break
    about = asked if family.content == "asked" else other
    passages = [_passage(entity, attributes, rng) for entity in rng.sample((asked, other), 2)]
    question = rng.choice(fact.questions).format(e=asked.name)
    return Demonstration(question, tuple(passages), family.answer(about.name, about.facts[fact.name]))


def _passage(entity: Entity, attributes: list[wording.Attribute], rng: random.Random) -> str:
    sentences = [rng.choice(wording.OPENINGS[entity.kind]).format(name=entity.name)]
    for attribute in rng.sample(attributes, len(attributes)):
        sentences.append(rng.choice(attribute.statements).format(e=entity.name, v=entity.facts[attribute.name]))
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
