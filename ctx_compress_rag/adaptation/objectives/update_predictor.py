"""The loss of an update predictor, on gradient descent's updates (RAG-GD)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder
from ctx_compress_rag.adaptation.predicted import PredictedUpdate
from ctx_compress_rag.adaptation.updates import GradientUpdate, matching_loss
from ctx_compress_rag.prompt import Prompt

Contexts = list[list[Prompt]]
"""The demonstrations of each support context."""


class MatchingObjective(nn.Module):
    """Eq. 9 against the K-step SGD update of eq. 8, mean over contexts, without an answer loss (appendix G).

    `update` holds the predictor to train and the frozen base adapter, `magnitude_weight` is lambda of eq. 9.
    """

    def __init__(self, decoder: AdaptiveDecoder, update: PredictedUpdate, magnitude_weight: float) -> None:
        super().__init__()
        self.decoder = decoder
        self.update = update
        self.predictor = update.predictor
        self.magnitude_weight = magnitude_weight

    def forward(self, contexts: Contexts, queries: Contexts) -> dict[str, Tensor]:
        """The loss of a batch; `queries` are not used."""
        target = self.update.target(self.decoder, contexts).change()
        predicted = self.update.predict(self.decoder, contexts)
        return {"loss": matching_loss(predicted, target, self.magnitude_weight).mean()}


@dataclass(frozen=True, eq=False)
class SolvedContexts:
    """Support contexts with the updates that gradient descent makes of them, to learn from many times.

    Solving a context takes K backward passes; learning from it takes almost no time.

    Attributes:
        pooled: (contexts, dim), see `pooled_states`.
        update: a row for each context, in bfloat16, whose rounding is far below the predictor's error.
    """

    pooled: Tensor
    update: GradientUpdate

    @classmethod
    def of(cls, decoder: AdaptiveDecoder, update: PredictedUpdate, batches: Iterable[Contexts]) -> SolvedContexts:
        """Solve contexts, batch by batch."""
        found = [(update.pooled(decoder, contexts), update.target(decoder, contexts)) for contexts in batches]
        a = {n: torch.cat([moved.a[n].bfloat16() for _, moved in found]) for n in update.base.a}
        b = {n: torch.cat([moved.b[n].bfloat16() for _, moved in found]) for n in update.base.b}
        return cls(torch.cat([pooled for pooled, _ in found]), GradientUpdate(update.base, a, b))

    def rows(self, indices: Tensor) -> tuple[Tensor, Adapter]:
        """Some contexts' pooled states, and the change of the weights (eq. 8) for each."""
        indices = indices.to(self.pooled.device)
        a, b = ({n: t[indices].float() for n, t in part.items()} for part in (self.update.a, self.update.b))
        return self.pooled[indices], GradientUpdate(self.update.base, a, b).change()


class SolvedMatchingObjective(nn.Module):
    """Eq. 9 against updates that were computed before, mean over contexts."""

    def __init__(self, update: PredictedUpdate, solved: SolvedContexts, magnitude_weight: float) -> None:
        super().__init__()
        self._solved = solved
        self.predictor = update.predictor
        self.magnitude_weight = magnitude_weight

    def forward(self, indices: Tensor) -> dict[str, Tensor]:
        """The loss of the contexts with these numbers."""
        pooled, target = self._solved.rows(indices)
        return {"loss": matching_loss(self.predictor(pooled), target, self.magnitude_weight).mean()}
