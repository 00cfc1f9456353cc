"""The stage `pointing_teacher`: a teacher's answer loss, and supervised attention (see `pointers`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from benchmarks.world.pointers import Pointers, PointingHeads, pointers_of
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.methods.base.compressor import padded
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.training.config import Recipe
from ctx_compress_rag.training.engine.loop import Job
from ctx_compress_rag.training.engine.processes import training_device
from ctx_compress_rag.training.examples import load_examples
from ctx_compress_rag.training.objective import ExampleCollator
from ctx_compress_rag.training.prompts import PromptBuilder, draw_template
from ctx_compress_rag.training.recipe import register
from ctx_compress_rag.training.stages.teacher import AnswerLoss, save_decoder


class PointingTeacherRecipe(Recipe):
    """Train all weights of a decoder on questions whose data says what they are about.

    Attributes:
        decoder: its folder.
        context_loss_weight: weight of a token that is not in an answer in the next-token loss.
        weight: of the loss on attention.
        name_layer, copy_layer: the layers whose first head is trained, counted from 0.
    """

    stage: Literal["pointing_teacher"]
    decoder: str
    context_loss_weight: float = Field(default=0.0, ge=0)
    weight: float = Field(default=1.0, gt=0)
    name_layer: int = Field(default=1, ge=0)
    copy_layer: int = Field(default=2, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> PointingTeacherRecipe:
        if self.copy_layer <= self.name_layer:
            raise ValueError(f"copy_layer {self.copy_layer} must come after name_layer {self.name_layer}")
        return self


class PointingLoss(AnswerLoss):
    """The answer loss, plus `weight` times the loss on what two heads attend to."""

    def __init__(self, decoder: nn.Module, context_weight: float, heads: PointingHeads, weight: float) -> None:
        super().__init__(decoder)
        self.context_weight, self.heads, self.weight = context_weight, heads, weight

    def items(  # type: ignore[override]
        self, attention_mask: Tensor, answers: Tensor, pointers: Any = (), **_: Any
    ) -> Tensor:
        """The sum of the tokens' weights, and the numbers of pointers to names and to copies: (3,)."""
        weights = super().items(attention_mask, answers)
        return torch.stack([weights, *(weights.new_tensor(len(each.rows)) for each in pointers)])

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        answers: Tensor,
        pointers: tuple[Pointers, Pointers],
        num_items_in_batch: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The loss of a right-padded batch; tensors are (batch, length), `pointers` to names and to copies."""
        if num_items_in_batch is None:
            num_items_in_batch = self.items(attention_mask, answers, pointers)
        tokens, *counts = num_items_in_batch
        with self.heads.watching():
            loss = super().forward(input_ids, attention_mask, answers, tokens)["loss"]
            for which, (wanted, count) in enumerate(zip(pointers, counts, strict=True)):
                share = len(wanted.rows) / count.clamp(min=1)
                loss = loss + self.weight * share * self.heads.loss(which, wanted.to(input_ids.device))
        return {"loss": loss}

    def weights(self, attention_mask: Tensor, answers: Tensor) -> Tensor:
        """The weight of each token that is predicted: (batch, length - 1)."""
        return torch.where(answers[:, 1:], 1.0, self.context_weight) * attention_mask[:, 1:]


@dataclass
class PointingCollator(ExampleCollator):
    """Examples -> a right-padded batch of full-text prompts that says what tokens should attend to.

    Passages are not truncated.
    """

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        prompts = []
        found: tuple[list[tuple[int, int, int, int]], ...] = ([], [])
        for number, example in enumerate(examples):
            template = draw_template(self.templates, example, self.seed)
            prompt, *own_pointers = pointers_of(self.builder, example, template)
            prompts.append(prompt)
            for own, rows in zip(own_pointers, found, strict=True):
                rows += [(number, *pointer) for pointer in own]
        ids, mask = padded([prompt.ids().tolist() for prompt in prompts], torch.device("cpu"))
        answers = nn.utils.rnn.pad_sequence([prompt.answers for prompt in prompts], batch_first=True)
        pointers = tuple(map(Pointers.of, found))
        return {"input_ids": ids, "attention_mask": mask, "answers": answers, "pointers": pointers}


def start(recipe: PointingTeacherRecipe) -> Job:
    """Make the job that trains a decoder on the recipe's questions."""
    decoder, tokenizer = load_decoder(recipe.decoder, None, training_device())
    decoder.float().requires_grad_(True)
    data = recipe.data
    builder = PromptBuilder(tokenizer, data.max_answer_tokens)
    heads = PointingHeads(decoder, (recipe.name_layer, recipe.copy_layer))
    return Job(
        PointingLoss(decoder, recipe.context_loss_weight, heads, recipe.weight),
        load_examples(recipe),
        PointingCollator(builder, data.templates, data.max_context_tokens, recipe.seed),
        lambda report: save_decoder(decoder, tokenizer, recipe.output),
    )


register(PointingTeacherRecipe, start)
