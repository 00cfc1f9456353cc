"""Passages said again from their slots (paper 000, section 3.5, stage I; xRAG's paraphrase pretraining).

The loss is `LikelihoodLoss`: here the answers are the passages' own text (eq. 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctx_compress_rag.training.data import Example, Turn
from ctx_compress_rag.training.objectives.base import PassageTable, SlotRows
from ctx_compress_rag.training.prompts import PromptBuilder, SlotRow, draw_template


def recited(passage: str) -> Example:
    """A passage as its own answer."""
    return Example((passage,), (Turn("", (passage,)),))


def passages_of(examples: Sequence[Example]) -> list[Example]:
    """The distinct passages of examples, each an example of its own, in order; the questions are left out."""
    return [recited(passage) for passage in dict.fromkeys(p for e in examples for p in e.passages)]


class ReconstructionCollator:
    """Examples of one passage each -> the arguments of `LikelihoodLoss`.

    Args:
        builder: renders prompts; its longest answer bounds what is said of a passage.
        templates: prompts with a {context}, one drawn for each passage.
        max_context_tokens: longest passage.
        seed: of the draws.
    """

    def __init__(self, builder: PromptBuilder, templates: Sequence[str], max_context_tokens: int, seed: int) -> None:
        self.builder = builder
        self.templates = templates
        self.max_context_tokens = max_context_tokens
        self.seed = seed

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        table = PassageTable()
        rows: list[SlotRow] = []
        places: list[list[int]] = []
        for example in examples:
            [(text, ids)] = self.builder.shortened(example.passages, self.max_context_tokens)
            rows.append(self.builder.slot_row(recited(text), draw_template(self.templates, example, self.seed)))
            places.append([table.place(text, ids)])
        return {"passages": table.batch(), "prompts": SlotRows(rows, places)}
