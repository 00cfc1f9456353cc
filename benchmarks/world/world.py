"""An invented world: passages about people, towns and organizations, and questions about them.

Everything here is made up, so a decoder can only answer by reading. Names are compounds, and a
hash of the name decides its split: a name met in training never appears in a test passage.

Passages of one world refer to each other (a person is born in a town that has a passage of its
own), which gives questions that need two passages.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from benchmarks.world import wording
from benchmarks.world.wording import Kind
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.errors import DataError

Split = Literal["train", "dev", "test"]

PASSAGES_PER_PROMPT = 4
EXAMPLES_PER_WORLD = 4
NAMED = 0.95
KINDS: tuple[Kind, ...] = ("person", "person", "person", "town", "town", "town", "organisation", "organisation")
PASSAGES_PER_WORLD = len(KINDS)


@dataclass
class Entity:
    """An invented thing with its facts; `passage` states some of them."""

    kind: Kind
    name: str
    facts: dict[str, str] = field(default_factory=dict)
    passage: str = ""
    stated: tuple[str, ...] = ()


def split_of(root: str) -> Split:
    """The split a compound name belongs to: one in eight is test, one in eight dev."""
    bucket = hashlib.md5(root.encode()).digest()[0] % 8
    return "test" if bucket == 0 else "dev" if bucket == 1 else "train"


def _compound(rng: random.Random, heads: tuple[str, ...], tails: tuple[str, ...], split: Split) -> str:
    while True:
        root = rng.choice(heads) + rng.choice(tails)
        if split_of(root) == split:
            return root


def _name(rng: random.Random, kind: Kind, split: Split) -> str:
    if kind == "person":
        surname = _compound(rng, wording.SURNAME_HEADS, wording.SURNAME_TAILS, split)
        return f"{rng.choice(wording.FIRST_NAMES)} {surname}"
    if kind == "town":
        return _compound(rng, wording.TOWN_HEADS, wording.TOWN_TAILS, split)
    root = _compound(rng, wording.ORGANISATION_HEADS, wording.ORGANISATION_TAILS, split)
    return f"{root} {rng.choice(wording.ORGANISATION_KINDS)}"


class World:
    """Eight linked entities with a passage each, wholly determined by the arguments.

    Args:
        split: which names may appear.
        seed: for all random draws.
        named: share of sentences that name the passage's entity; the rest say "this town" and the like.
        kinds: of the entities, in order.
    """

    def __init__(self, split: Split, seed: int, named: float = NAMED, kinds: Sequence[Kind] = KINDS) -> None:
        self.split = split
        self._named = named
        self._rng = random.Random(f"{split}:{seed}")
        self.entities: list[Entity] = []
        taken: set[str] = set()
        for kind in kinds:
            name = _name(self._rng, kind, split)
            while name in taken:
                name = _name(self._rng, kind, split)
            taken.add(name)
            self.entities.append(Entity(kind, name))
        for entity in self.entities:
            self._invent(entity)
            self._write(entity)

    def _link(self, kind: Kind) -> str:
        """A name of `kind`: mostly an entity of this world, otherwise a name without a passage."""
        own = [e.name for e in self.entities if e.kind == kind]
        return self._rng.choice(own) if self._rng.random() < 0.75 and own else _name(self._rng, kind, self.split)

    def _invent(self, entity: Entity) -> None:
        for attribute in wording.ATTRIBUTES[entity.kind]:
            if attribute.links_to:
                value = self._link(attribute.links_to)
                while value == entity.name:
                    value = self._link(attribute.links_to)
            else:
                value = attribute.draw(self._rng)
            entity.facts[attribute.name] = value

    def _write(self, entity: Entity) -> None:
        rng = self._rng
        attributes = list(wording.ATTRIBUTES[entity.kind])
        rng.shuffle(attributes)
        attributes = attributes[: rng.randint(4, 6)]
        sentences = [rng.choice(wording.OPENINGS[entity.kind]).format(name=entity.name)]
        for attribute in attributes:
            subject = entity.name if rng.random() < self._named else rng.choice(wording.REFERENCES[entity.kind])
            sentences.append(rng.choice(attribute.statements).format(e=subject, v=entity.facts[attribute.name]))
        entity.passage = " ".join(s[0].upper() + s[1:] for s in sentences)
        entity.stated = tuple(a.name for a in attributes)

    def passages(self) -> list[str]:
        """The world's passages, one per entity."""
        return [e.passage for e in self.entities]

    def turns(self, entities: list[Entity]) -> list[Turn]:
        """Questions that the passages of `entities` answer, one per attribute or pair of facts, shuffled.

        Those that need two passages have no `subject`.

        Each attribute is asked about only one entity of a kind. Otherwise a decoder could learn to answer with the
        value that has not been an answer yet, without ever matching names.
        """
        rng = self._rng
        by_name = {e.name: e for e in entities}
        single: dict[tuple[Kind, str], list[Turn]] = {}
        double: list[Turn] = []
        for entity in entities:
            for name in entity.stated:
                attribute = wording.attribute(entity.kind, name)
                value = entity.facts[name]
                question = rng.choice(attribute.questions).format(e=entity.name)
                single.setdefault((entity.kind, name), []).append(Turn(question, (value,), entity.name))
                linked = by_name.get(value)
                if attribute.bridge and linked:
                    far = rng.choice(linked.stated)
                    far_attribute = wording.attribute(linked.kind, far)
                    question = rng.choice(far_attribute.questions).format(e=attribute.bridge.format(e=entity.name))
                    double.append(Turn(question, (linked.facts[far],)))
        for first in entities:
            for second in entities:
                shared = [n for n in first.stated if n in second.stated] if first.kind == second.kind else []
                if first is not second and shared:
                    attribute = wording.attribute(first.kind, rng.choice(shared))
                    question = attribute.pair_question.format(a=first.name, b=second.name)
                    answer = f"{first.facts[attribute.name]} and {second.facts[attribute.name]}"
                    double.append(Turn(question, (answer,)))
        asked = [rng.choice(turns) for turns in single.values()]
        rng.shuffle(asked)
        rng.shuffle(double)
        # About one question in six needs two passages.
        return [double.pop() if double and rng.random() < 1 / 6 else turn for turn in asked]

    def example(self, passages: int = PASSAGES_PER_PROMPT, turns: int = 6) -> Example:
        """A prompt of `passages` passages in random order with up to `turns` questions about them."""
        chosen = self._rng.sample(self.entities, passages)
        return Example(tuple(e.passage for e in chosen), tuple(self.turns(chosen)[:turns]))


def world_examples(
    split: str,
    seed: int,
    count: int,
    max_turns: int = 6,
    passages: Sequence[int] = (PASSAGES_PER_PROMPT,),
    named: float | None = None,
    alike: float = 0.0,
) -> list[Example]:
    """Make `count` examples; consecutive ones share a world, so their passages need encoding only once.

    `passages` are numbers of passages per prompt, of which one is drawn for each sixteen consecutive examples: batches
    of similar prompts need little padding. `alike` is the share of worlds whose passages are all about one kind of
    thing, as retrieved ones often are: then only names tell them apart.
    """
    if split not in get_args(Split):
        raise DataError(f"the invented world has splits train, dev and test, not {split!r}")
    examples = []
    for start in range(0, count, EXAMPLES_PER_WORLD):
        number = seed + start // EXAMPLES_PER_WORLD
        draws = random.Random(f"alike:{number}")
        kinds = (draws.choice(KINDS),) * PASSAGES_PER_WORLD if draws.random() < alike else KINDS
        world = World(cast(Split, split), number, NAMED if named is None else named, kinds)
        for index in range(start, min(start + EXAMPLES_PER_WORLD, count)):
            size = random.Random(seed * 31 + index // 16).choice(passages)
            examples.append(world.example(size, max_turns))
    return examples


def tokenizer_texts(count: int = 3000) -> Iterator[str]:
    """Texts to train a tokenizer on, in which compound names are split into their two parts.

    Otherwise names of the training split would become single tokens, and unseen names would not:
    the test split would look like another language.
    """
    for heads, tails in wording.COMPOUNDS:
        for _ in range(300):
            for head in heads:
                yield " " + head
            for tail in tails:
                yield "\n" + tail  # after a line break it has no leading space, as inside a name
    roots = {head + tail for heads, tails in wording.COMPOUNDS for head in heads for tail in tails}
    for example in world_examples("train", 0, count):
        for text in (*example.passages, *(f"{t.question} {t.answers[0]}" for t in example.turns)):
            # Yield each word by itself, with its leading space, so that compounds can be left out.
            first, *rest = text.split(" ")
            yield "\n\n" + first
            for word in rest:
                if word.rstrip(".,?") not in roots:
                    yield " " + word
