"""Prompts of several passages whose distractors are the nearest neighbors of the right one."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.evaluation.questions import NeighborPassages
from ctx_compress_rag.text.sentences import split_sentences

NEAREST = 30
"""Distractors are drawn from so many neighbors."""


def among_neighbors(examples: Sequence[Example], counts: Sequence[int], rounds: int = 1) -> list[Example]:
    """Put each example's passage among neighbors that do not mention its answers.

    Args:
        examples: examples of one passage each.
        counts: the numbers of passages to draw from for a prompt.
        rounds: how often each example is taken, each time among other draws of its neighbors.

    Returns: the examples in order, round after round, each turn with the sentence of its answer as evidence, if one
    has it.
    """
    neighbors = NeighborPassages([e.passages[0] for e in examples])
    distractors = []
    for example in examples:
        answers = [answer for turn in example.turns for answer in turn.answers]
        [own] = example.passages
        near = (each for each in neighbors.of(own, answers) if each != own)
        distractors.append(list(islice(near, NEAREST)))
    made = []
    for number in range(rounds):
        rng = random.Random(number)
        for example, others in zip(examples, distractors, strict=True):
            [own] = example.passages
            chosen = [own, *rng.sample(others, min(len(others), rng.choice(counts) - 1))]
            rng.shuffle(chosen)
            made.append(Example(tuple(chosen), tuple(with_evidence(turn, own) for turn in example.turns)))
    return made


def with_evidence(turn: Turn, passage: str) -> Turn:
    """The turn with the first sentence that has its answer as evidence."""
    found = (part.strip() for part in split_sentences(passage) if turn.answers[0] in part)
    return replace(turn, evidence=tuple(part for part in [next(found, "")] if part))
