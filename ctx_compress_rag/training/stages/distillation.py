"""Stage distillation: slots read as the teacher reads the full text (Simple Context Compression)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.training.engine.loop import Collate, Examples
from ctx_compress_rag.training.objectives.distillation import DistillationCollator, DistillationLoss, with_repeats
from ctx_compress_rag.training.stages.compression import CompressionRecipe, builder_of, register_objective


class DistillationRecipe(CompressionRecipe):
    """Distillation from the full-text teacher (Simple Context Compression), summed over ratios (eq. 6)."""

    stage: Literal["distillation"]
    reconstruction_weight: float = Field(default=0.0, ge=0)
    repeat_per_batch: int = Field(default=8, gt=0)


def objective(recipe: DistillationRecipe, bundle: Bundle) -> tuple[DistillationLoss, Collate]:
    """The loss and what feeds it."""
    data, builder = recipe.data, builder_of(recipe, bundle)
    same_passes = bool(recipe.reconstruction_weight and recipe.optim.shard)
    return (
        DistillationLoss(bundle, recipe.reconstruction_weight),
        DistillationCollator(builder, data.templates, data.max_context_tokens, recipe.seed, same_passes=same_passes),
    )


def arrange(recipe: DistillationRecipe, examples: list[Example]) -> Examples:
    """The examples, with the passages that they also repeat."""
    if not recipe.reconstruction_weight:
        return examples
    return with_repeats(examples, recipe.optim.batch_size, recipe.repeat_per_batch, recipe.seed)


register_objective(DistillationRecipe, objective, arrange)
