"""The losses of the base retrieval adapter and of the update predictor (RAG-GD)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctx_compress_rag.adaptation.adapter import Adapter, projections
from ctx_compress_rag.adaptation.predicted import PredictedUpdate
from ctx_compress_rag.adaptation.updates import GradientUpdate, answer_losses, matching_loss
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.training.engine.loop import BatchMean

Contexts = list[list[Prompt]]
"""The demonstrations of each support context."""


class AnswersMean(BatchMean, nn.Module):
    """The base class of losses that are the mean cross-entropy of the whole batch's answer tokens."""

    def __init__(self, decoder: PlainDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def items(self, rows: list[Prompt]) -> Tensor:  # type: ignore[override]
        return torch.tensor([float(sum(int(row.answers.sum()) for row in rows))])

    def share(self, items: Tensor, rows: list[Prompt], adapter: Adapter | None) -> Tensor:
        """Return the part of the loss that comes from `rows`; `items`, (1,), counts the whole batch's answer tokens."""
        loss = answer_losses(self.decoder, [rows], adapter)[0]
        return loss * self.items(rows).squeeze(0).to(loss.device) / items.squeeze(0)


class RetrievalAdapterLoss(AnswersMean):
    """The loss that trains Q/K/V LoRA factors, on the answers' tokens (In-Context Optimization, appendix G)."""

    def __init__(self, decoder: PlainDecoder, rank: int, alpha: int) -> None:
        super().__init__(decoder)
        self.scale = alpha / rank
        shapes = projections(decoder.backbone.model)
        self.names = list(shapes)
        # LoRA's initial values: `a` random, `b` zero.
        self.a = nn.ParameterList(nn.Parameter(torch.empty(rank, d_in)) for d_in, _ in shapes.values())
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(d_out, rank)) for _, d_out in shapes.values())
        for a in self.a:
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))

    def adapter(self) -> Adapter:
        return Adapter(
            dict(zip(self.names, self.a, strict=True)), dict(zip(self.names, self.b, strict=True)), self.scale
        )

    def loss(self, items: Tensor, rows: list[Prompt]) -> Tensor:  # type: ignore[override]
        return self.share(items, rows, self.adapter())


class MatchingLoss(nn.Module):
    """The loss of eq. 9 against the update of K SGD steps (eq. 8), a mean over contexts; no answer loss (appendix G).

    `keep` keeps the gradient-descent update of each context, by the context's number, to learn from it again, because
    solving a context takes K backward passes and learning from it almost no time. Updates are kept in bfloat16, whose
    rounding is far below the predictor's error.
    """

    def __init__(
        self, decoder: PlainDecoder, update: PredictedUpdate, magnitude_weight: float, keep: bool = False
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.update = update
        self.predictor = update.predictor
        self.magnitude_weight = magnitude_weight
        self.keep = keep
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    def forward(self, numbers: Sequence[int], contexts: Contexts, queries: Contexts) -> dict[str, Tensor]:
        if not self.keep:
            pooled = self.update.pooled(self.decoder, contexts)
            target = self.update.target(self.decoder, contexts)
        else:
            pooled, target = self._known(numbers, contexts)
        loss = matching_loss(self.predictor(pooled), target.change(), self.magnitude_weight)
        return {"loss": loss.mean()}

    def _known(self, numbers: Sequence[int], contexts: Contexts) -> tuple[Tensor, GradientUpdate]:
        """Return pooled states and updates of contexts; solve those that are new."""
        new = {number: context for number, context in zip(numbers, contexts, strict=True) if number not in self._kept}
        if new:
            pooled = self.update.pooled(self.decoder, list(new.values()))
            solved = self.update.target(self.decoder, list(new.values()))
            moved = [t.bfloat16() for t in (*solved.a.values(), *solved.b.values())]
            self._kept |= zip(new, zip(pooled, *moved, strict=True), strict=True)
        pooled, *factors = (torch.stack(each) for each in zip(*(self._kept[n] for n in numbers), strict=True))
        names, half = self.update.base.a, len(factors) // 2
        a, b = (dict(zip(names, (t.float() for t in part), strict=True)) for part in (factors[:half], factors[half:]))
        return pooled, GradientUpdate(self.update.base, a, b)
