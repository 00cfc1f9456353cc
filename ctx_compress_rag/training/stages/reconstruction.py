"""Stage reconstruction: passages said again from their slots (ArcAligner's stage I)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.text.templates import PARAPHRASES
from ctx_compress_rag.training.engine.loop import Collate
from ctx_compress_rag.training.objectives.likelihood import LikelihoodLoss
from ctx_compress_rag.training.objectives.reconstruction import ReconstructionCollator
from ctx_compress_rag.training.prompts import PromptBuilder
from ctx_compress_rag.training.stages.compression import CompressionRecipe, register_objective


class ReconstructionRecipe(CompressionRecipe):
    """The likelihood of passages reconstructed from their slots (ArcAligner, stage I, eq. 10).

    Each distinct passage of the data is a row of its own; questions are ignored. Passages, and so the answers, are
    truncated to `data.max_context_tokens`.

    Attributes:
        paraphrases: prompts with {context} in place of the slots; one is drawn for each passage (table 7).
    """

    asks = False
    recites = True
    stage: Literal["reconstruction"]
    paraphrases: list[str] = Field(default=list(PARAPHRASES), min_length=1)

    @model_validator(mode="after")
    def _slots_have_a_place(self) -> ReconstructionRecipe:
        for template in self.paraphrases:
            if template.count("{context}") != 1:
                raise ValueError(f"a paraphrase needs exactly one {{context}}: {template!r}")
        return self


def objective(recipe: ReconstructionRecipe, bundle: Bundle) -> tuple[LikelihoodLoss, Collate]:
    """The loss and what feeds it."""
    longest = recipe.data.max_context_tokens
    builder = PromptBuilder(bundle.tokenizer, longest + 1)  # and the end token
    return LikelihoodLoss(bundle), ReconstructionCollator(builder, recipe.paraphrases, longest, recipe.seed)


register_objective(ReconstructionRecipe, objective)
