"""The base retrieval adapter, and prompt tuning beside it: answers' likelihood from retrieval-formatted examples."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ctx_compress_rag.adaptation.adapter import Adapter, projections
from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder
from ctx_compress_rag.adaptation.updates import answer_losses
from ctx_compress_rag.prompt import Prompt


class RetrievalAdapterLoss(nn.Module):
    """Trains Q/K/V LoRA factors on the answers' tokens (In-Context Optimization, appendix G).

    Args:
        decoder: the frozen decoder.
        rank: of the factors.
        alpha: LoRA's alpha; the change is alpha / rank * b @ a.
    """

    def __init__(self, decoder: AdaptiveDecoder, rank: int, alpha: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.scale = alpha / rank
        shapes = projections(decoder.bundle.backbone.model)
        self.names = list(shapes)
        # As LoRA starts: `a` at random, `b` at zero.
        self.a = nn.ParameterList(nn.Parameter(torch.empty(rank, d_in)) for d_in, _ in shapes.values())
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(d_out, rank)) for _, d_out in shapes.values())
        for a in self.a:
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))

    def adapter(self) -> Adapter:
        """The adapter as it is."""
        return Adapter(
            dict(zip(self.names, self.a, strict=True)), dict(zip(self.names, self.b, strict=True)), self.scale
        )

    def forward(self, rows: list[Prompt]) -> dict[str, Tensor]:
        """Mean cross-entropy of the batch's answer tokens."""
        return {"loss": answer_losses(self.decoder, [rows], self.adapter())[0]}


class PromptTuningLoss(nn.Module):
    """Trains a soft prefix on the same (Lester et al., 2021), which starts as embeddings of tokens drawn at random.

    Args:
        decoder: the frozen decoder.
        virtual_tokens: length of the prefix.
        seed: of the draw.
    """

    def __init__(self, decoder: AdaptiveDecoder, virtual_tokens: int, seed: int) -> None:
        super().__init__()
        self.decoder = decoder
        embeddings = decoder.bundle.backbone.embeddings
        device = embeddings.weight.device
        ids = torch.randint(embeddings.num_embeddings, (virtual_tokens,), generator=torch.Generator().manual_seed(seed))
        # Through the layer: Gemma's scales what it looks up.
        self.prefix = nn.Parameter(embeddings(ids.to(device)).detach().float().clone())

    def forward(self, rows: list[Prompt]) -> dict[str, Tensor]:
        """Mean cross-entropy of the batch's answer tokens."""
        return {"loss": answer_losses(self.decoder, [rows], None, self.prefix)[0]}
