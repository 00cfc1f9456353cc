"""Stage next_token: the text that follows a compressed beginning (ComprExIT's first phase)."""

from __future__ import annotations

from typing import Literal

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.training.engine.loop import Collate
from ctx_compress_rag.training.objectives.likelihood import LikelihoodLoss
from ctx_compress_rag.training.objectives.next_token import NextTokenCollator
from ctx_compress_rag.training.stages.compression import CompressionRecipe, register_objective


class NextTokenRecipe(CompressionRecipe):
    """The likelihood of the text that follows a compressed beginning (ComprExIT, section 3.3).

    Compresses `data.max_context_tokens` and predicts `data.max_answer_tokens`; questions are ignored.
    """

    asks = False
    stage: Literal["next_token"]


def objective(recipe: NextTokenRecipe, bundle: Bundle) -> tuple[LikelihoodLoss, Collate]:
    """The loss and what feeds it."""
    data = recipe.data
    return LikelihoodLoss(bundle), NextTokenCollator(bundle.tokenizer, data.max_context_tokens, data.max_answer_tokens)


register_objective(NextTokenRecipe, objective)
