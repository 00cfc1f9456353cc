"""Stage reconstruction: passages said again from their slots (ArcAligner, section 3.5, stage I; xRAG's pretraining)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.text.templates import PARAPHRASES
from ctx_compress_rag.training.examples import recited
from ctx_compress_rag.training.prompts import PromptBuilder
from ctx_compress_rag.training.recipe import register
from ctx_compress_rag.training.stages.answer import AnswerCollator, LikelihoodLoss
from ctx_compress_rag.training.stages.compression import CompressionRecipe, Objective, start


class ReconstructionRecipe(CompressionRecipe):
    """The likelihood of passages reconstructed from their slots (ArcAligner, stage I, eq. 10).

    Each distinct passage of the data is a row of its own; questions are ignored. Passages, and so the answers, are
    truncated to `data.max_context_tokens`. One of the paper's prompts is drawn for each (table 7).
    """

    asks = False
    recites = True
    stage: Literal["reconstruction"]

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        """The loss, what feeds it, and on what."""
        longest = self.data.max_context_tokens
        builder = PromptBuilder(bundle.tokenizer, longest + 1)  # and the end token
        return LikelihoodLoss(bundle), ReconstructionCollator(builder, PARAPHRASES, longest, self.seed), examples


class ReconstructionCollator(AnswerCollator):
    """Examples of one passage each -> the arguments of `LikelihoodLoss`: the passage itself is the answer.

    The builder limits the answer's length; a prompt is drawn for each passage.
    """

    def asked(self, example: Example, texts: Sequence[str]) -> Example:
        """The shortened passage, to be reconstructed."""
        [text] = texts
        return recited(text)


register(ReconstructionRecipe, start)
