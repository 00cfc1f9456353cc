"""The stage ram: learn to answer from kept and skimmed segments, and which to keep (Read As Human, eq. 7-9)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.errors import ConfigError, DataError
from ctx_compress_rag.methods.base.compressor import PassageSlots, SlotBatch, pad_token_ids
from ctx_compress_rag.methods.ram import (
    RamCompressor,
    RamSegments,
    passages_with_holes,
    segment_means,
    segment_relevance,
    segment_runs,
    slots_of_runs,
)
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR
from ctx_compress_rag.training.engine.loop import BatchMeanLoss
from ctx_compress_rag.training.objective import ExampleCollator, SlotObjective, TrainingBatch
from ctx_compress_rag.training.prompts import TrainingPromptBuilder, draw_prompt_template
from ctx_compress_rag.training.stages.compression import CompressionRecipe, Objective


class RamRecipe(CompressionRecipe):
    """The recipe of RAM: learn to answer from kept and skimmed segments, and which to keep (Read As Human, eq. 7-9).

    One run trains all ratios, because each question draws one of the step's ratios.

    Attributes:
        base_ratio: the method's `segment_tokens`.
        ratios: the paper's alpha, how many times shorter a prompt's context becomes.
        temperature: tau of eq. 8.
        contrastive: whether to add the contrastive loss; false is the paper's ablation.
    """

    stage: Literal["ram"]
    base_ratio: int = Field(default=50, gt=0)
    ratios: list[int] = Field(default=[2, 4, 8, 16, 32], min_length=1)
    window: int = Field(default=1000, gt=0)
    temperature: float = Field(default=0.1, gt=0)
    contrastive: bool = True

    def slot_ratios(self) -> list[int]:
        """Return the length of segments alone, because `ratios` apply to prompts."""
        return [self.base_ratio]

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        data, builder = self.data, self.builder(bundle)
        collate = RamCollator(builder, data.templates, data.max_context_tokens, self.seed, bundle.config.base_ratio)
        return RamLoss(bundle, builder, self.temperature, self.contrastive), collate, examples


@dataclass(frozen=True)
class RamTrainingRow:
    """One question about `example`."""

    example: Example
    template: str
    passages: list[int]  # the indices of the prompt's passages in the batch, in order
    question: list[int]  # token ids
    positives: list[bool]  # for each segment of these passages, whether the question needs it

    @property
    def token_count(self) -> int:  # without passages, of which the model chooses what it keeps
        return len(self.question)


class RamLoss(BatchMeanLoss, SlotObjective):
    """The loss L_nll + L_con (eq. 9), averaged over the batch's questions.

    Each question draws one of the step's ratios (section 4.1). Prompts are built as `RamCompressor.render` and the
    decoder build them: kept segments are text, tokenized with the prompt. The choice of segments passes no gradient.
    L_con trains the representations of segments; L_nll trains the vectors of skimmed segments. Both train the encoder,
    and L_nll also the alignment matrix. `temperature` and `contrastive` are those of `RamRecipe`.
    """

    def __init__(
        self, bundle: Bundle, builder: TrainingPromptBuilder, temperature: float = 0.1, contrastive: bool = True
    ) -> None:
        if not isinstance(bundle.compressor, RamCompressor):
            raise ConfigError(f"stage ram trains method ram, not {bundle.config.method.name}: change stage or method")
        super().__init__(bundle)
        self.ram = bundle.compressor
        self.builder = builder
        self.temperature = temperature
        self.contrastive = contrastive

    def items(self, rows: list[RamTrainingRow], **_: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor([float(len(rows))])

    def loss(self, items: Tensor, passages: list[RamSegments], rows: list[RamTrainingRow]) -> Tensor:  # type: ignore[override]
        ids, mask = pad_token_ids([ids for passage in passages for ids in passage.ids], self.bundle.backbone.device)
        hidden = self.ram.read(ids, mask)
        means, counts = segment_means(hidden, mask), mask.sum(1)
        first = list(accumulate((len(passage.ids) for passage in passages), initial=0))
        prompts, softs, contrast = TrainingBatch([], []), list[PassageSlots](), list[Tensor]()
        question_ids, question_mask = pad_token_ids([row.question for row in rows], self.bundle.backbone.device)
        questions = segment_means(self.ram.read(question_ids, question_mask), question_mask)  # r_q of each
        for row, question in zip(rows, questions, strict=True):
            own = [passages[p] for p in row.passages]
            places = [i for p in row.passages for i in range(first[p], first[p + 1])]
            [reduction] = self.draw(row.example, 1)
            kept = self.ram.choose(question, means[places], counts[places], reduction)
            skimmed = [place for place, stays in zip(places, kept, strict=True) if not stays]
            vectors = self.ram.condense(hidden[skimmed], mask[skimmed], question)
            layouts = segment_runs(own, kept)
            slots = slots_of_runs(vectors, counts[skimmed], layouts)
            context = PASSAGE_SEPARATOR.join(passages_with_holes(own, layouts, repeat(self.builder.HOLE)))
            prompts.prompts.append(self.builder.holed_prompt(row.example, row.template, context))
            prompts.passages.append(list(range(len(softs), len(softs) + len(slots))))
            softs += slots
            contrast.append(self._contrast(question, means[places], row.positives))
        loss = self._likelihood(prompts, softs)
        if self.contrastive:
            loss = loss + torch.stack(contrast).sum()
        return loss / items.squeeze(0)

    def _contrast(self, question: Tensor, segments: Tensor, positives: Sequence[bool]) -> Tensor:
        """Return L_con of a question (eq. 8), which is 0 if no segment is positive."""
        log_p = (segment_relevance(question, segments) / self.temperature).log_softmax(0)
        positive = torch.tensor(positives, device=log_p.device)
        return -log_p[positive].sum() / max(1, int(positive.sum()))

    def _likelihood(self, prompts: TrainingBatch, softs: Sequence[PassageSlots]) -> Tensor:
        """Return L_nll (eq. 7), averaged over each answer's tokens and summed over questions."""
        logits, targets = self.answer_logits(prompts, SlotBatch.of(softs))
        lengths = prompts.answer_lengths()
        answers = zip(logits.split(lengths), targets.split(lengths), strict=True)
        return torch.stack([F.cross_entropy(*answer) for answer in answers]).sum()


@dataclass
class RamCollator(ExampleCollator):
    """A collator that makes the arguments of `RamLoss`: a prompt for each question, since its context depends on it.

    Positives are the segments that contain a part of the question's `evidence`, the positions that a dataset or, in the
    paper, a large model marks. Without evidence they are the segments that contain an accepted answer, word by word. A
    question has no positives, and no contrastive term, if its answer is nowhere in the text, or is yes or no, because
    finding these words does not mean finding the answer. A context that is cut may lose its evidence.

    `segment_tokens` is the length of a segment. A template is drawn for each question.
    """

    segment_tokens: int

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        passages: dict[str, RamSegments] = {}
        rows: list[RamTrainingRow] = []
        for example in examples:
            texts = [text for text, _ in self.builder.shortened(example.passages, self.max_context_tokens)]
            for text in texts:
                if text not in passages:
                    passages[text] = RamSegments.of(self.builder.tokenizer, text, self.segment_tokens)
            for turn in example.turns:
                alone = Example(example.passages, (turn,))
                rows.append(
                    RamTrainingRow(
                        alone,
                        draw_prompt_template(self.templates, alone, self.seed),
                        [list(passages).index(text) for text in texts],
                        self._question_ids(turn.question),
                        [flag for text in texts for flag in _positives(passages[text], turn)],
                    )
                )
        return {"passages": list(passages.values()), "rows": rows}

    def _question_ids(self, question: str) -> list[int]:
        ids: list[int] = self.builder.passage_ids(question).tolist()
        if not ids:
            raise DataError(f"the question {question!r} has no tokens, and ram chooses segments by it: leave it out")
        return ids


def _positives(passage: RamSegments, turn: Turn) -> list[bool]:
    if turn.evidence:
        return passage.quoted(turn.evidence)
    return passage.holding_answers([answer for answer in turn.answers if answer.strip().lower() not in ("yes", "no")])
