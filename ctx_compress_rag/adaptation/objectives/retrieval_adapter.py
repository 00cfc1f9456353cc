"""Loss of the base retrieval adapter: the likelihood of answers in retrieval-formatted examples."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ctx_compress_rag.adaptation.adapter import Adapter, projections
from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder
from ctx_compress_rag.adaptation.updates import answer_losses
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.training.engine.loop import BatchMean


class AnswersMean(nn.Module, BatchMean):
    """Mean cross-entropy of the whole batch's answer tokens."""

    def __init__(self, decoder: AdaptiveDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def items(self, rows: list[Prompt]) -> Tensor:  # type: ignore[override]
        """Number of answer tokens: (1,)."""
        return torch.tensor([float(sum(int(row.answers.sum()) for row in rows))])

    def share(
        self, rows: list[Prompt], num_items_in_batch: Tensor | None, adapter: Adapter | None
    ) -> dict[str, Tensor]:
        """These rows' part of the mean over the batch's answer tokens; None: over their own."""
        loss = answer_losses(self.decoder, [rows], adapter)[0]
        if num_items_in_batch is None:
            return {"loss": loss}
        [own], [tokens] = self.items(rows), num_items_in_batch
        return {"loss": loss * own.to(loss.device) / tokens}


class RetrievalAdapterLoss(AnswersMean):
    """Trains Q/K/V LoRA factors on the answers' tokens (In-Context Optimization, appendix G).

    The change of a projection's weight is alpha / rank * b @ a.
    """

    def __init__(self, decoder: AdaptiveDecoder, rank: int, alpha: int) -> None:
        super().__init__(decoder)
        self.scale = alpha / rank
        shapes = projections(decoder.bundle.backbone.model)
        self.names = list(shapes)
        # LoRA's initial values: `a` random, `b` zero.
        self.a = nn.ParameterList(nn.Parameter(torch.empty(rank, d_in)) for d_in, _ in shapes.values())
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(d_out, rank)) for _, d_out in shapes.values())
        for a in self.a:
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))

    def adapter(self) -> Adapter:
        """The adapter as trained so far."""
        return Adapter(
            dict(zip(self.names, self.a, strict=True)), dict(zip(self.names, self.b, strict=True)), self.scale
        )

    def forward(self, rows: list[Prompt], num_items_in_batch: Tensor | None = None) -> dict[str, Tensor]:
        """The loss of these rows; `num_items_in_batch`: answer tokens of the whole batch; None: of these rows."""
        return self.share(rows, num_items_in_batch, self.adapter())
