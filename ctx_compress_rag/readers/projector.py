"""Sentence vectors projected into the decoder's embedding space (paper 000, eq. 1-2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.backbone import Backbone
from ctx_compress_rag.config import TuneConfig
from ctx_compress_rag.readers.linear import LinearReader

# E[GELU(x)^2] for standard normal x.
_GELU_POWER = 0.42522


class Projector(nn.Module):
    """W_psi of eq. 1: two linear maps with a GELU between them.

    The paper says only "lightweight projector". This is xRAG's: a sentence encoder's space is not a
    rotation of the decoder's, so one linear map is too little, and its vectors come ready-made, so
    there is nothing before the projector that could learn the rest.

    Args:
        slot_dim: width of a sentence vector.
        dim: width of the decoder's embeddings, and of the layer between.
    """

    def __init__(self, slot_dim: int, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(slot_dim, dim)
        self.outer = nn.Linear(dim, dim)

    def initialise(self, slot_rms: float, embedding_rms: float) -> None:
        """Draw weights that keep slots apart and give them the size of token embeddings.

        Args:
            slot_rms: root mean square of the sentence vectors' entries.
            embedding_rms: that of the decoder's input embeddings.
        """
        with torch.no_grad():
            for layer in (self.inner, self.outer):
                layer.bias.zero_()
            # The inner layer's outputs are then of unit variance, as GELU wants them.
            self.inner.weight.normal_(std=1 / (max(slot_rms, 1e-6) * self.inner.in_features**0.5))
            self.outer.weight.normal_(std=embedding_rms / (_GELU_POWER * self.outer.in_features) ** 0.5)

    def forward(self, slots: Tensor) -> Tensor:
        """Sentence vectors as the decoder's input embeddings, in this module's precision.

        Shape: (slots, slot_dim) -> (slots, dim)
        """
        projected: Tensor = self.outer(F.gelu(self.inner(slots.to(self.inner.weight.dtype))))
        return projected


class ProjectorReader(LinearReader):
    """A `Projector` in the place of the linear map; the decoder is adapted as `LinearReader` does it.

    Args:
        backbone: the decoder.
        slot_dim: width of a stored slot.
        tune: how the decoder is adapted; xRAG leaves it frozen.
    """

    def __init__(self, backbone: Backbone, slot_dim: int, tune: TuneConfig) -> None:
        super().__init__(backbone, slot_dim, tune, linear=False)
        self.projector = Projector(slot_dim, backbone.dim).to(backbone.device).requires_grad_(False)

    def initialise(self, slot_rms: float) -> None:
        """Draw a projector that gives slots of this root mean square the size of token embeddings."""
        self.projector.initialise(slot_rms, self.backbone.embedding_rms())

    def trained_parameters(self) -> list[nn.Parameter]:
        """Make what this reader trains trainable and return it."""
        return [*self.projector.requires_grad_(True).parameters(), *super().trained_parameters()]

    def forward(self, slots: Tensor, token_counts: Tensor) -> Tensor:
        """Slots as the decoder's input embeddings; `token_counts` is not used."""
        projected: Tensor = self.projector(slots)
        return projected
