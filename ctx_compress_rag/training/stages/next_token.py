"""Stage next_token: the text that follows a compressed beginning (ComprExIT's first phase, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.prompt import PromptTemplate
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR
from ctx_compress_rag.text.tokenizing import bos_id, text_ids
from ctx_compress_rag.training.objective import PassageTable, PromptBatch
from ctx_compress_rag.training.recipe import register
from ctx_compress_rag.training.stages.answer import LikelihoodLoss
from ctx_compress_rag.training.stages.compression import CompressionRecipe, Objective, start


class NextTokenRecipe(CompressionRecipe):
    """The likelihood of the text that follows a compressed beginning (ComprExIT, section 3.3).

    Compresses `data.max_context_tokens` and predicts `data.max_answer_tokens`; questions are ignored.
    """

    asks = False
    stage: Literal["next_token"]

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        """The loss, what feeds it, and on what."""
        collate = NextTokenCollator(bundle.tokenizer, self.data.max_context_tokens, self.data.max_answer_tokens)
        return LikelihoodLoss(bundle), collate, examples


@dataclass
class NextTokenCollator:
    """Examples -> the arguments of `LikelihoodLoss`: text that continues after its compressed beginning.

    An example's passages are joined into one text; its questions are ignored. The beginning of the text is
    compressed, and the rest is predicted after the decoder's BOS and the slots (ComprExIT, appendix A.4:
    512 and 128 tokens). A text shorter than both together is divided in the same proportion; a longer one is
    truncated.

    Args:
        tokenizer: the decoder's.
        context_tokens: maximum length of the beginning.
        continuation_tokens: maximum length of the continuation.
    """

    tokenizer: Any
    context_tokens: int
    continuation_tokens: int

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        bos = bos_id(self.tokenizer)
        before = torch.tensor([] if bos is None else [bos], dtype=torch.long)
        table = PassageTable()
        prompts: list[PromptTemplate] = []
        places: list[list[int]] = []
        for example in examples:
            context, continuation = self._cut(PASSAGE_SEPARATOR.join(example.passages))
            masks = (torch.zeros_like(before).bool(), torch.ones_like(continuation).bool())
            prompts.append(PromptTemplate((before, continuation), masks))
            places.append([table.place(self.tokenizer.decode(context), context)])
        return {"passages": table.passages, "prompts": PromptBatch(prompts, places)}

    def _cut(self, text: str) -> tuple[Tensor, Tensor]:
        """Token ids of the text's beginning and of its continuation."""
        ids = torch.tensor(text_ids(self.tokenizer, text), dtype=torch.long)
        if len(ids) < 2:
            raise DataError(f"nothing follows the first token of {text[:40]!r}: leave the example out")
        most = self.context_tokens + self.continuation_tokens
        ids = ids[:most]
        cut = max(1, len(ids) * self.context_tokens // most)
        return ids[:cut], ids[cut:]


register(NextTokenRecipe, start)
