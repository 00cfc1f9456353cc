"""Stage answer: answers read from slots (fine-tuning in ArcAligner, ComprExIT and xRAG)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.training.engine.loop import Collate
from ctx_compress_rag.training.objectives.likelihood import AnswerCollator, LikelihoodLoss
from ctx_compress_rag.training.stages.compression import CompressionRecipe, builder_of, register_objective


class AnswerRecipe(CompressionRecipe):
    """The likelihood of answers read from slots (fine-tuning in ArcAligner and ComprExIT).

    `self_distillation` is the weight of KL(decoder with text || decoder with slots) on the same tokens (xRAG).
    """

    stage: Literal["answer"]
    self_distillation: float = Field(default=0.0, ge=0)


def objective(recipe: AnswerRecipe, bundle: Bundle) -> tuple[LikelihoodLoss, Collate]:
    """The loss and what feeds it."""
    data, weight = recipe.data, recipe.self_distillation
    collate = AnswerCollator(
        builder_of(recipe, bundle), data.templates, data.max_context_tokens, recipe.seed, with_text=weight > 0
    )
    return LikelihoodLoss(bundle, weight), collate


register_objective(AnswerRecipe, objective)
