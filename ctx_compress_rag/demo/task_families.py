"""Task families of the invented world: questions with one of a hundred conventions for their answers.

A prompt has one passage, which states two facts of a thing, and asks for one of them. How the answer is to be
given no prompt says: with the thing's name, twice, or bare; and before which code words. Demonstrations of the
same family show it.

Families differ between training and test. Every part of a convention occurs in training, and so does every
pair of parts; a test family is a combination of three that training never had. Conventions are such that
exact match and F1 can tell them apart: case, punctuation and articles they could not. They are such, too,
that they can be seen at an answer's end, whose hidden state is all that RAG-GD's predictor is given of it: in
so small a decoder that state says little of an answer's first word, or of which fact was asked for.
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

Echo = Literal["value", "name and value", "value and name", "value twice"]

ECHOES: tuple[Echo, ...] = ("value", "name and value", "value and name", "value twice")
# Words that the demo's decoder gives as answers, each a token: attention's adapters cannot teach it to spell.
MARKS = ("", "salt", "silk", "amber", "tea")
ENDS = ("", "bread", "kites", "snow", "stars")

_FACTS = 2


@dataclass(frozen=True)
class Family:
    """A convention for answers.

    Attributes:
        echo: what stands beside the value.
        mark, end: words that follow.
    """

    echo: Echo
    mark: str
    end: str

    @property
    def name(self) -> str:
        """The convention in a few words."""
        return ", ".join(part for part in (self.echo, self.mark, self.end) if part)

    @property
    def split(self) -> Split:
        """Which split it belongs to: of the five marks to each echo and end, four train."""
        end = ENDS.index(self.end)
        if (ECHOES.index(self.echo) + MARKS.index(self.mark) + 2 * end) % 5 < 4:
            return "train"
        return "dev" if end % 2 else "test"

    def answer(self, name: str, value: str) -> str:
        """The answer that gives `value`, a fact of the thing called `name`."""
        body = {
            "value": value,
            "name and value": f"{name} {value}",
            "value and name": f"{value} {name}",
            "value twice": f"{value} and {value}",
        }[self.echo]
        return " ".join(part for part in (body, self.mark, self.end) if part)


FAMILIES = tuple(Family(*parts) for parts in product(ECHOES, MARKS, ENDS))


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
    """A question of a family with its passage and its answer; names are of `split` (see `demo.world`)."""
    entity = rng.choice(World(split, rng.randrange(1 << 40)).entities)
    facts = rng.sample(wording.ATTRIBUTES[entity.kind], _FACTS)
    question = rng.choice(facts[0].questions).format(e=entity.name)
    answer = family.answer(entity.name, entity.facts[facts[0].name])
    return Demonstration(question, (_passage(entity, facts, rng),), answer)


def _passage(entity: Entity, attributes: list[wording.Attribute], rng: random.Random) -> str:
    sentences = [rng.choice(wording.OPENINGS[entity.kind]).format(name=entity.name)]
    for attribute in rng.sample(attributes, len(attributes)):
        sentences.append(rng.choice(attribute.statements).format(e=entity.name, v=entity.facts[attribute.name]))
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
