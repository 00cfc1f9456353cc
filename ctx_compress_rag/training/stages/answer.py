"""Stage answer: likelihood of answers read from slots (ArcAligner, eq. 10; ComprExIT, section 3.3; xRAG)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.methods.base.compressor import Tokenized
from ctx_compress_rag.prompt import Prompt, PromptTemplate
from ctx_compress_rag.training.engine.loop import BatchMean
from ctx_compress_rag.training.objective import ExampleCollator, PassageTable, PromptBatch, SlotObjective
from ctx_compress_rag.training.prompts import draw_template
from ctx_compress_rag.training.recipe import register
from ctx_compress_rag.training.stages.compression import CompressionRecipe, Objective, start


class AnswerRecipe(CompressionRecipe):
    """The likelihood of answers read from slots (fine-tuning in ArcAligner and ComprExIT).

    `self_distillation` is the weight of KL(decoder with text || decoder with slots) on the same tokens (xRAG).
    """

    stage: Literal["answer"]
    self_distillation: float = Field(default=0.0, ge=0)

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        """The loss, what feeds it, and on what."""
        data, weight = self.data, self.self_distillation
        builder = self.builder(bundle)
        collate = AnswerCollator(builder, data.templates, data.max_context_tokens, self.seed, with_text=weight > 0)
        return LikelihoodLoss(bundle, weight), collate, examples


class LikelihoodLoss(SlotObjective, BatchMean):
    """Cross-entropy of the answers' tokens given the slots, mean over the batch's tokens, summed over its ratios.

    The collator decides what the answers are: answers to questions, the passages' own text
    (reconstruction), or the text that follows them (next token).

    Args:
        bundle: the bundle to train.
        self_distillation: weight of KL(decoder with text || decoder with slots) on the same tokens, mean over them
            (xRAG, Cheng et al., 2024, where it is 2).
    """

    def __init__(self, bundle: Bundle, self_distillation: float = 0.0) -> None:
        super().__init__(bundle)
        self.self_distillation = self_distillation

    def items(self, prompts: PromptBatch, **_: Any) -> Tensor:  # type: ignore[override]
        """Number of answer tokens: (1,)."""
        return prompts.answer_tokens()

    def forward(  # type: ignore[override]
        self,
        passages: Sequence[Tokenized],
        prompts: PromptBatch,
        text_prompts: Sequence[Prompt] = (),
        num_items_in_batch: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The loss of a batch: passages, prompts with holes for them, and full-text prompts for self-distillation."""
        targets = self.teacher_log_probs(text_prompts) if self.self_distillation else []
        loss = torch.zeros((), device=self.bundle.backbone.device)
        drawn = self.drawn(prompts.prompts)
        for ratio, batch in self.compress(passages, drawn).items():
            logits, answers = self.answer_logits(prompts.only(drawn[ratio]), batch)
            loss = loss + F.cross_entropy(logits, answers, reduction="sum")
            if targets:
                loss = loss + self.self_distillation * self.divergence(logits, targets, drawn[ratio])
        [tokens] = self.items(prompts) if num_items_in_batch is None else num_items_in_batch
        return {"loss": loss / tokens}


@dataclass
class AnswerCollator(ExampleCollator):
    """Examples -> the arguments of `LikelihoodLoss`: questions answered from slots.

    `with_text` also makes full-text prompts, for the teacher.
    """

    with_text: bool = False

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        table = PassageTable()
        prompts: list[PromptTemplate] = []
        text_prompts: list[Prompt] = []
        places: list[list[int]] = []
        for example in examples:
            short = self.builder.shortened(example.passages, self.max_context_tokens)
            texts = [text for text, _ in short]
            asked, template = self.asked(example, texts), draw_template(self.templates, example, self.seed)
            prompts.append(self.builder.holed_prompt(asked, template))
            if self.with_text:
                text_prompts.append(self.builder.text_prompt(asked, template, texts))
            places.append([table.place(text, ids) for text, ids in short])
        return {
            "passages": table.passages,
            "prompts": PromptBatch(prompts, places),
            "text_prompts": text_prompts,
        }

    def asked(self, example: Example, texts: Sequence[str]) -> Example:
        """The example whose questions are asked about `texts`, its shortened passages."""
        return example


register(AnswerRecipe, start)
