"""Prompts of several passages whose distractors are the nearest neighbors of the right one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tqdm.auto import tqdm

from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.models.sentence_embedding import passage_vectors
from ctx_compress_rag.text.answers import mentions_answer
from ctx_compress_rag.text.sentences import sentences

NEAREST = 30
"""Distractors are drawn from so many neighbors."""

_AT_ONCE = 512


def among_neighbors(examples: Sequence[Example], counts: Sequence[int], rounds: int = 1) -> list[Example]:
    """Put each example's passage among neighbors that do not mention its answers.

    Args:
        examples: examples of one passage each.
        counts: the numbers of passages to draw from for a prompt.
        rounds: how often each example is taken, each time among other draws of its neighbors.

    Returns: the examples in order, round after round, each turn with the sentence of its answer as evidence, if one
    has it.
    """
    passages = list(dict.fromkeys(e.passages[0] for e in examples))
    place = {passage: number for number, passage in enumerate(passages)}
    vectors = np.concatenate(
        [
            passage_vectors(passages[start : start + _AT_ONCE])
            for start in tqdm(range(0, len(passages), _AT_ONCE), desc="MiniLM", unit="batch")
        ]
    )
    distractors = []
    for example in examples:
        [own] = example.passages
        near = np.argsort(-(vectors @ vectors[place[own]]), kind="stable")[1 : NEAREST + 1]
        answers = [answer for turn in example.turns for answer in turn.answers]
        found = (passages[i] for i in near)
        distractors.append([other for other in found if other != own and not mentions_answer(other, answers)])
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
    found = (part.strip() for part in sentences(passage) if turn.answers[0] in part)
    return replace(turn, evidence=tuple(part for part in [next(found, "")] if part))
