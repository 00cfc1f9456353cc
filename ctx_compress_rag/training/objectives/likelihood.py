"""Negative log-likelihood of answers read from slots (ArcAligner, eq. 10; ComprExIT, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.methods.base.compressor import PassageBatch
from ctx_compress_rag.prompt import HoledPrompt
from ctx_compress_rag.text.prompts import PromptBuilder, draw_template
from ctx_compress_rag.training.objectives.base import PassageTable, PromptBatch, SlotObjective
from ctx_compress_rag.training.whole_batch import WholeBatchMean


class LikelihoodLoss(WholeBatchMean, SlotObjective):
    """Cross-entropy of the answers' tokens given the slots, mean over the batch's tokens, summed over its ratios.

    What the answers are, the collator decides: answers to questions, the passages' own text
    (reconstruction), or the text that follows them (next token).
    """

    def items(self, passages: PassageBatch, prompts: PromptBatch) -> Tensor:  # type: ignore[override]
        """The answers' tokens: (1,)."""
        return prompts.answer_tokens()

    def forward(  # type: ignore[override]
        self, passages: PassageBatch, prompts: PromptBatch, num_items_in_batch: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The loss of a batch: its passages, and prompts with holes for them."""
        loss = torch.zeros((), device=self.bundle.backbone.device)
        drawn = self.drawn(len(prompts.prompts))
        for ratio, batch in self.compress(passages, drawn).items():
            loss = loss + F.cross_entropy(*self.answer_logits(prompts.only(drawn[ratio]), batch), reduction="sum")
        [tokens] = self.items(passages, prompts) if num_items_in_batch is None else num_items_in_batch
        return {"loss": loss / tokens}


class AnswerCollator:
    """Examples -> the arguments of `LikelihoodLoss`: questions answered from slots.

    Args:
        builder: renders prompts.
        templates: prompt templates, one drawn for each example.
        max_context_tokens: longest context of an example, shared evenly by its passages.
        seed: of the draws.
    """

    def __init__(self, builder: PromptBuilder, templates: Sequence[str], max_context_tokens: int, seed: int) -> None:
        self.builder = builder
        self.templates = templates
        self.max_context_tokens = max_context_tokens
        self.seed = seed

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        table = PassageTable()
        prompts: list[HoledPrompt] = []
        places: list[list[int]] = []
        for example in examples:
            short = self.builder.shortened(example.passages, self.max_context_tokens)
            asked = self.asked(example, [text for text, _ in short])
            prompts.append(self.builder.holed_prompt(asked, draw_template(self.templates, example, self.seed)))
            places.append([table.place(text, ids) for text, ids in short])
        return {"passages": table.batch(), "prompts": PromptBatch(prompts, places)}

    def asked(self, example: Example, texts: Sequence[str]) -> Example:
        """What is asked of an example, whose passages became `texts`: its own questions."""
        return example
