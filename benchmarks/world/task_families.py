"""Task families of the invented world: questions with one of 256 conventions for their answers.

A prompt has one passage, which states two facts about a thing, and asks for one of them. No prompt says with which two
code words to answer ("Nimholt in wool snow"). Only demonstrations of the family show it.

Families differ between training and test. Every code word occurs in training, with fourteen of its sixteen
partners; a test family is a pair that training never had. A decoder would learn a few pairs by heart; from many it
learns the words, and how two of them are combined. Conventions were chosen so that exact match and F1 distinguish them,
which they could not if they differed in case, punctuation or articles; so that a decoder of four layers can follow them
when only its attention is adapted; and so that they show at an answer's end, whose hidden state is all that RAG-GD's
predictor sees of it. In such a small decoder, that state holds little more than the last two words.
"""

import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.world import wording
from benchmarks.world.world import Entity, Split, World
from ctx_compress_rag.adaptation.adapt import Demonstration
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl

# Words that the demo's decoder gives as answers, each one token: adapters of attention cannot teach it to spell.
MARKS = (
    "salt", "silk", "amber", "tea", "honey", "wool", "linen", "tin",
    "rope", "paper", "cider", "copper", "wax", "sugar", "coal", "cotton",
)  # fmt: skip
ENDS = (
    "bread", "kites", "snow", "stars", "drums", "masks", "apples", "boats",
    "horses", "ribbons", "mirrors", "flowers", "giants", "smoke", "wheels", "shadows",
)  # fmt: skip

_FACTS = 2


@dataclass(frozen=True)
class Family:
    """A convention for answers: the two code words that follow the value and "in".

    The first follows a word that is the same in all families: an attention layer has to learn only which word
    comes next, for any value. Nothing stands between the two, so that an answer's end is near both.
    """

    mark: str
    end: str

    @property
    def name(self) -> str:
        """The convention in a few words."""
        return f"{self.mark} {self.end}"

    @property
    def split(self) -> Split:
        """Its split: of each word's pairs, one is for tests, one for development, the rest for training."""
        diagonal = (MARKS.index(self.mark) + ENDS.index(self.end)) % len(ENDS)
        return "test" if diagonal == 0 else "dev" if diagonal == 1 else "train"

    def answer(self, value: str) -> str:
        """The answer that gives `value`."""
        return f"{value} in {self.mark} {self.end}"


FAMILIES = tuple(Family(*parts) for parts in product(MARKS, ENDS))


def families(split: Split) -> tuple[Family, ...]:
    """The families of a split."""
    return tuple(family for family in FAMILIES if family.split == split)


def draw(family: Family, split: Split, rng: random.Random) -> Demonstration:
    """A question of a family with its passage and its answer; names are from `split` (see `world`)."""
    entity = rng.choice(World(split, rng.randrange(1 << 40)).entities)
    facts = rng.sample(wording.ATTRIBUTES[entity.kind], _FACTS)
    question = rng.choice(facts[0].questions).format(e=entity.name)
    answer = family.answer(entity.facts[facts[0].name])
    return Demonstration(question, (_passage(entity, facts, rng),), answer)


def _passage(entity: Entity, attributes: list[wording.Attribute], rng: random.Random) -> str:
    sentences = [rng.choice(wording.OPENINGS[entity.kind]).format(name=entity.name)]
    for attribute in rng.sample(attributes, len(attributes)):
        sentences.append(rng.choice(attribute.statements).format(e=entity.name, v=entity.facts[attribute.name]))
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def write_families(folder: Path, split: Split, count: int, seed: int = 0) -> int:
    """Write `count` questions of each family of a split as a JSONL file named after it; return the number of files."""
    folder.mkdir(parents=True, exist_ok=True)
    for family in families(split):
        rng = random.Random(f"{seed}:{split}:{family.name}")
        drawn = [draw(family, split, rng) for _ in range(count)]
        rows = [Example(one.passages, (Turn(one.question, (one.answer,)),)) for one in drawn]
        write_jsonl(folder / f"{family.name.replace(' ', '_')}.jsonl", rows)
    return len(families(split))
