"""Losses of an update predictor: on gradient descent's updates (RAG-GD), or on answers (HyperTuning)."""

from __future__ import annotations

from torch import Tensor, nn

from ctx_compress_rag.adaptation.baselines import PredictedUpdate
from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder
from ctx_compress_rag.adaptation.solved import SolvedContexts
from ctx_compress_rag.adaptation.updates import answer_losses, matching_loss
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
        target = self.update.target(self.decoder, contexts)
        predicted = self.update.predict(self.decoder, contexts)
        return {"loss": matching_loss(predicted, target, self.magnitude_weight).mean()}


class SolvedMatchingObjective(nn.Module):
    """Eq. 9 against updates that were computed earlier, mean over contexts."""

    def __init__(self, update: PredictedUpdate, solved: SolvedContexts, magnitude_weight: float) -> None:
        super().__init__()
        self._solved = solved
        self.predictor = update.predictor
        self.magnitude_weight = magnitude_weight

    def forward(self, indices: Tensor) -> dict[str, Tensor]:
        """The loss of the contexts with these numbers."""
        pooled, target = self._solved.rows(indices.to(self._solved.pooled.device))
        return {"loss": matching_loss(self.predictor(pooled), target, self.magnitude_weight).mean()}


class TaskObjective(nn.Module):
    """The answer loss on a question of the same task, with the predicted update (HyperTuning)."""

    def __init__(self, decoder: AdaptiveDecoder, update: PredictedUpdate) -> None:
        super().__init__()
        self.decoder = decoder
        self.update = update
        self.predictor = update.predictor

    def forward(self, contexts: Contexts, queries: Contexts) -> dict[str, Tensor]:
        """The loss of a batch: a context's `queries` are answered with its update."""
        adapter = self.update.base.plus(self.update.predict(self.decoder, contexts))
        return {"loss": answer_losses(self.decoder, queries, adapter).mean()}
