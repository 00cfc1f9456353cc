"""The stage distillation: slots are read as the teacher reads the text (Simple Context Compression, section 4.2)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.methods.base.compressor import TokenizedPassage
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.training.engine.loop import BatchMeanLoss
from ctx_compress_rag.training.objective import SlotObjective, TrainingBatch
from ctx_compress_rag.training.prompts import recitation_example
from ctx_compress_rag.training.stages.answer import AnswerCollator
from ctx_compress_rag.training.stages.compression import CompressionRecipe, Objective

REPEAT = "{context}\n\nRepeat the text."


class DistillationRecipe(CompressionRecipe):
    """The recipe of distillation from the full-text teacher (Simple Context Compression), summed over ratios (eq. 6).

    Attributes:
        reconstruction_weight: weight of the next-token loss of passages repeated from their slots; not in the paper.
        repeat_share: the share of examples whose passages are repeated.
    """

    stage: Literal["distillation"]
    reconstruction_weight: float = Field(default=0.0, ge=0)
    repeat_share: float = Field(default=0.5, gt=0, le=1)

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        data, builder = self.data, self.builder(bundle)
        loss = DistillationLoss(bundle, self.reconstruction_weight)
        share = self.repeat_share if self.reconstruction_weight else 0.0
        collate = DistillationCollator(builder, data.templates, data.max_context_tokens, self.seed, repeat_share=share)
        return loss, collate, examples


class DistillationLoss(BatchMeanLoss, SlotObjective):
    """The sum over ratios of KL(teacher || student) on the answers' tokens (eq. 5-6), averaged over the examples.

    The teacher is the bundle's decoder reading plain text.
    """

    def __init__(self, bundle: Bundle, reconstruction_weight: float = 0.0) -> None:
        super().__init__(bundle)
        self.reconstruction_weight = reconstruction_weight

    def items(self, text_prompts: list[Prompt], repeats: TrainingBatch, **_: Any) -> Tensor:  # type: ignore[override]
        return torch.cat((torch.tensor([float(len(text_prompts))]), repeats.answer_tokens()))

    def loss(  # type: ignore[override]
        self,
        items: Tensor,
        passages: Sequence[TokenizedPassage],
        text_prompts: list[Prompt],
        prompts: TrainingBatch,
        repeats: TrainingBatch,
    ) -> Tensor:
        """Return the loss of a batch; `repeats` are prompts whose answer is a passage's own text."""
        examples, repeated_tokens = items
        targets = self.teacher_log_probs(text_prompts)
        loss = torch.zeros((), device=self.bundle.backbone.device)
        drawn, repeated_at = self.drawn(prompts.prompts), self.drawn(repeats.prompts)
        ratios = list(drawn | repeated_at)
        for ratio, batch in self.compressor(passages, ratios, self.bundle.config.window).items():
            if own := drawn.get(ratio):
                logits, _ = self.answer_logits(prompts.only(own), batch)
                loss = loss + self.divergence(logits, targets, own) / examples
            if own := repeated_at.get(ratio):
                logits, answers = self.answer_logits(repeats.only(own), batch)
                repeated = F.cross_entropy(logits, answers, reduction="sum") / repeated_tokens
                loss = loss + self.reconstruction_weight * repeated
        return loss


@dataclass
class DistillationCollator(AnswerCollator):
    """A collator that makes the arguments of `DistillationLoss`.

    The passages of a `repeat_share` of the examples are repeated. An example is drawn by its own content, so that
    micro-batches and processes change nothing.
    """

    with_text: bool = True
    repeat_share: float = 0.0

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        batch = super().__call__(examples)
        repeated = [
            place
            for example, places in zip(examples, batch["prompts"].passages, strict=True)
            if random.Random(f"{self.seed}:{example}").random() < self.repeat_share
            for place in places
        ]
        texts = [batch["passages"][place].text for place in repeated]
        repeats = [self.builder.holed_prompt(recitation_example(text), REPEAT) for text in texts]
        return batch | {"repeats": TrainingBatch(repeats, [[place] for place in repeated])}
