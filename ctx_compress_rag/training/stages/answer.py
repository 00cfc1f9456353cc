"""The stages answer, next_token and reconstruction, which train on the likelihood of a text given slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.methods.base.compressor import TokenizedPassage
from ctx_compress_rag.prompt import Prompt, PromptTemplate
from ctx_compress_rag.text.templates import PARAPHRASES, PASSAGE_SEPARATOR
from ctx_compress_rag.text.tokenizing import bos_token_id, text_ids
from ctx_compress_rag.training.engine.loop import BatchMeanLoss
from ctx_compress_rag.training.objective import ExampleCollator, SlotObjective, TrainingBatch
from ctx_compress_rag.training.prompts import TrainingPromptBuilder, draw_prompt_template, recitation_example
from ctx_compress_rag.training.stages.compression import CompressionRecipe, Objective


class AnswerRecipe(CompressionRecipe):
    """The recipe of stage answer: the likelihood of answers given slots (ArcAligner, eq. 10; ComprExIT, section 3.3).

    `self_distillation` is the weight of KL(decoder with text || decoder with slots), averaged over the same tokens
    (xRAG, Cheng et al., 2024, where it is 2).
    """

    stage: Literal["answer"]
    self_distillation: float = Field(default=0.0, ge=0)

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        data, weight = self.data, self.self_distillation
        builder = self.builder(bundle)
        collate = AnswerCollator(builder, data.templates, data.max_context_tokens, self.seed, with_text=weight > 0)
        return LikelihoodLoss(bundle, weight), collate, examples


class LikelihoodLoss(BatchMeanLoss, SlotObjective):
    """The cross-entropy of the answers' tokens given slots, averaged over the batch's tokens, summed over its ratios.

    The collator decides what the answers are. `self_distillation` is that of `AnswerRecipe`.
    """

    def __init__(self, bundle: Bundle, self_distillation: float = 0.0) -> None:
        super().__init__(bundle)
        self.self_distillation = self_distillation

    def items(self, prompts: TrainingBatch, **_: Any) -> Tensor:  # type: ignore[override]
        return prompts.answer_tokens()

    def loss(  # type: ignore[override]
        self,
        items: Tensor,
        passages: Sequence[TokenizedPassage],
        prompts: TrainingBatch,
        text_prompts: Sequence[Prompt] = (),
    ) -> Tensor:
        targets = self.teacher_log_probs(text_prompts) if self.self_distillation else []
        loss = torch.zeros((), device=self.bundle.backbone.device)
        drawn = self.drawn(prompts.prompts)
        for ratio, batch in self.compressor(passages, list(drawn), self.bundle.config.window).items():
            logits, answers = self.answer_logits(prompts.only(drawn[ratio]), batch)
            loss = loss + F.cross_entropy(logits, answers, reduction="sum")
            if targets:
                loss = loss + self.self_distillation * self.divergence(logits, targets, drawn[ratio])
        return loss / items.squeeze(0)


@dataclass
class AnswerCollator(ExampleCollator):
    """A collator that turns examples into the arguments of `LikelihoodLoss`.

    `with_text` also makes prompts with the full text, for the teacher. With `recites` the answer is not the example's,
    but its only passage as it is compressed.
    """

    with_text: bool = False
    recites: bool = False

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        passages: dict[str, TokenizedPassage] = {}  # each once, also if examples share it
        prompts: list[PromptTemplate] = []
        text_prompts: list[Prompt] = []
        places: list[list[int]] = []
        for example in examples:
            short = self.builder.shortened(example.passages, self.max_context_tokens)
            texts = [text for text, _ in short]
            asked = recitation_example(*texts) if self.recites else example
            template = draw_prompt_template(self.templates, example, self.seed)
            prompts.append(self.builder.holed_prompt(asked, template))
            if self.with_text:
                text_prompts.append(self.builder.text_prompt(asked, template, texts))
            for text, ids in short:
                passages.setdefault(text, TokenizedPassage(text, ids.tolist()))
            places.append([list(passages).index(text) for text in texts])
        return {
            "passages": list(passages.values()),
            "prompts": TrainingBatch(prompts, places),
            "text_prompts": text_prompts,
        }


class NextTokenRecipe(CompressionRecipe):
    """The recipe of stage next_token: the likelihood of what follows a compressed beginning (ComprExIT, section 3.3).

    The first `data.max_context_tokens` are compressed, the next `data.max_answer_tokens` predicted, questions ignored.
    """

    asks = False
    stage: Literal["next_token"]

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        collate = NextTokenCollator(bundle.tokenizer, self.data.max_context_tokens, self.data.max_answer_tokens)
        return LikelihoodLoss(bundle), collate, examples


@dataclass
class NextTokenCollator:
    """A collator that turns examples into the arguments of `LikelihoodLoss`: text after its compressed beginning.

    An example's passages are joined into one text. Its beginning is compressed, and the rest is predicted after the
    decoder's BOS and the slots (ComprExIT, appendix A.4: 512 and 128 tokens). A text shorter than both together is
    divided in the same proportion; a longer one is truncated. Raises DataError for a text of fewer than two tokens.
    """

    tokenizer: Any
    context_tokens: int
    continuation_tokens: int

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        bos = bos_token_id(self.tokenizer)
        before = np.array([] if bos is None else [bos], np.int64)
        passages: dict[str, TokenizedPassage] = {}
        prompts: list[PromptTemplate] = []
        places: list[list[int]] = []
        for example in examples:
            context, continuation = self._cut(PASSAGE_SEPARATOR.join(example.passages))
            masks = np.zeros(len(before), bool), np.ones(len(continuation), bool)
            prompts.append(PromptTemplate((before, continuation.numpy()), masks))
            text = self.tokenizer.decode(context)
            passages.setdefault(text, TokenizedPassage(text, context.tolist()))
            places.append([list(passages).index(text)])
        return {"passages": list(passages.values()), "prompts": TrainingBatch(prompts, places)}

    def _cut(self, text: str) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(text_ids(self.tokenizer, text), dtype=torch.long)
        if len(ids) < 2:
            raise DataError(f"nothing follows the first token of {text[:40]!r}: leave the example out")
        most = self.context_tokens + self.continuation_tokens
        ids = ids[:most]
        cut = max(1, len(ids) * self.context_tokens // most)
        return ids[:cut], ids[cut:]


class ReconstructionRecipe(CompressionRecipe):
    """The recipe of stage reconstruction: the likelihood of passages given their slots (ArcAligner, stage I, eq. 10).

    It is also xRAG's pretraining. Each distinct passage of the data is an example, truncated to
    `data.max_context_tokens`, and questions are ignored. One of ArcAligner's prompts (table 7) is drawn for each.
    """

    asks = False
    recites = True
    stage: Literal["reconstruction"]

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        longest = self.data.max_context_tokens
        builder = TrainingPromptBuilder(bundle.tokenizer, longest + 1)  # and the end token
        return LikelihoodLoss(bundle), AnswerCollator(builder, PARAPHRASES, longest, self.seed, recites=True), examples
