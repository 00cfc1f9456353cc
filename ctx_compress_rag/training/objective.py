"""What every loss over slots needs: the trained parts, prompts with holes for slots, and logits at the answers."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.splice import answer_token_logits, splice_prompts
from ctx_compress_rag.methods.base.compressor import SlotBatch
from ctx_compress_rag.prompt import Prompt, PromptTemplate
from ctx_compress_rag.training.prompts import TrainingPromptBuilder


@dataclass(frozen=True)
class TrainingBatch:
    """Prompts with a hole for each passage, and for each hole the index of the passage in the batch that fills it."""

    prompts: list[PromptTemplate]
    passages: list[list[int]]

    def only(self, numbers: Sequence[int]) -> Self:
        return type(self)([self.prompts[i] for i in numbers], [self.passages[i] for i in numbers])

    @property
    def token_count(self) -> int:
        return sum(len(ids) for prompt in self.prompts for ids in prompt.ids)

    def answer_lengths(self) -> list[int]:
        return [sum(int(mask.sum()) for mask in prompt.answers) for prompt in self.prompts]

    def answer_tokens(self) -> Tensor:
        """Return the number of answer tokens in all prompts: float (1,)."""
        return torch.tensor([sum(self.answer_lengths())], dtype=torch.float32)


@dataclass
class ExampleCollator:
    """The base class of collators, which make prompts from examples, and a loss's arguments from prompts.

    One template is drawn for each example. Its passages share `max_context_tokens` (`passage_token_shares`).
    """

    builder: TrainingPromptBuilder
    templates: Sequence[str]
    max_context_tokens: int
    seed: int


class SlotObjective(nn.Module, ABC):
    """The base class of losses on the decoder's predictions from slots."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self.compressor = bundle.compressor
        self.reader = bundle.reader
        self.ratios: Sequence[int] = bundle.config.ratios  # of the current step
        self.sample: int | None = None  # how many ratios are drawn for each example; None trains all
        # Seeds of the draws. A draw also depends on the example, and not on micro-batches or processes.
        self.seed = self.step = 0
        self.bundle = bundle
        trained = bundle.compressor.trained_parameters() + bundle.reader.trained_parameters()
        own = {id(p) for p in self.parameters()}
        # Adapters live in the shared decoder, which is not a submodule.
        self.adapters = nn.ParameterList([p for p in trained if id(p) not in own])

    @abstractmethod
    def forward(self, **batch: Any) -> dict[str, Tensor]:
        """Return the loss of a collated batch, under the key "loss"."""

    def draw(self, example: object, count: int) -> list[int]:
        return random.Random(f"{self.seed}:{self.step}:{example}").sample(list(self.ratios), count)

    def drawn(self, prompts: Sequence[PromptTemplate]) -> dict[int, list[int]]:
        """Return for each of the step's ratios the indices of the prompts that train it, or no entry if none does."""
        if self.sample is None or self.sample >= len(self.ratios):
            return {ratio: list(range(len(prompts))) for ratio in self.ratios}
        draws = [self.draw([part.tolist() for part in prompt.ids], self.sample) for prompt in prompts]
        chosen = {ratio: [row for row, draw in enumerate(draws) if ratio in draw] for ratio in self.ratios}
        return {ratio: own for ratio, own in chosen.items() if own}

    def answer_logits(self, batch: TrainingBatch, slots: SlotBatch) -> tuple[Tensor, Tensor]:
        """Return what `answer_token_logits` does of the batch's prompts, with these slots in their holes."""
        contexts = slots.rows()
        # In the decoder's precision: the projection returns float32, which would make the whole row float32.
        dtype = self.bundle.backbone.embeddings.weight.dtype
        embedded = {
            p: self.reader(contexts[p].slots, contexts[p].token_counts).to(dtype) for own in batch.passages for p in own
        }
        prompts = [p.fill([embedded[i] for i in own]) for p, own in zip(batch.prompts, batch.passages, strict=True)]
        spliced = splice_prompts(self.bundle.backbone.inputs, prompts)
        with self.reader.decoder(spliced.slot_mask) as model:
            return answer_token_logits(model, spliced, prompts)

    def divergence(self, logits: Tensor, targets: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        """Return the summed KL(teacher || student), from `answer_logits` of `rows` and `teacher_log_probs` of all."""
        wanted = torch.cat([targets[row] for row in rows])
        return F.kl_div(F.log_softmax(logits, dim=-1), wanted, reduction="sum", log_target=True)

    @torch.no_grad()
    def teacher_log_probs(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Return each prompt's log-probabilities of answer tokens, given the full text: (answer tokens, vocabulary)."""
        with self.bundle.text_decoder() as model:
            logits, _ = answer_token_logits(model, splice_prompts(self.bundle.backbone.inputs, prompts), prompts)
        return list(F.log_softmax(logits, dim=-1).split([int(prompt.answers.sum()) for prompt in prompts]))
