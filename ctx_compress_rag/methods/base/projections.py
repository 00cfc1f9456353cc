"""Maps from stored slots to the decoder's input embeddings, and vectors around them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.methods.base.config import WrapConfig

# E[GELU(x)^2] for standard normal x.
_GELU_POWER = 0.42522


class LinearMap(nn.Linear):
    """z W^T for each slot z (Simple Context Compression, section 5.1; W_align of Read As Human, eq. 5)."""

    def __init__(self, slot_dim: int, dim: int) -> None:
        super().__init__(slot_dim, dim, bias=False)

    def initialize(self, slot_rms: float, embedding_rms: float) -> None:
        """A multiple of the identity that gives slots the root mean square of token embeddings.

        The two differ by up to two orders of magnitude; a decoder learns to ignore inputs of an unusual size.
        """
        with torch.no_grad():
            nn.init.eye_(self.weight)
            self.weight.mul_(embedding_rms / max(slot_rms, 1e-6))

    def forward(self, slots: Tensor) -> Tensor:
        """Slots as input embeddings, in this module's precision: (slots, slot_dim) -> (slots, dim)."""
        return super().forward(slots.to(self.weight.dtype))


class TwoLayerMap(nn.Module):
    """W_2 GELU(W_1 z + b_1) + b_2 for each slot z.

    It is the MLP of ComprExIT, eq. 13, and W_psi of ArcAligner, eq. 1. ArcAligner says only "lightweight
    projector"; this one is xRAG's. A sentence encoder's space is not a rotation of the decoder's, so one linear map
    is too little, and its vectors are frozen, so nothing before the projector could learn the rest. The papers name
    neither the activation nor the inner width, here the decoder's.

    `normed` first normalizes each slot to a root mean square of 1 (the adapter of Latent Context Language Models).
    """

    def __init__(self, slot_dim: int, dim: int, normed: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(slot_dim, dim)
        self.outer = nn.Linear(dim, dim)
        self.norm = nn.RMSNorm(slot_dim, eps=1e-6) if normed else None

    def initialize(self, slot_rms: float, embedding_rms: float) -> None:
        """Draw weights that keep slots distinct and give them the root mean square of embeddings; biases are zero."""
        with torch.no_grad():
            for layer in (self.inner, self.outer):
                layer.bias.zero_()
            # The inner layer's outputs then have unit variance, which suits GELU.
            size = max(slot_rms, 1e-6) if self.norm is None else 1.0
            self.inner.weight.normal_(std=1 / (size * self.inner.in_features**0.5))
            self.outer.weight.normal_(std=embedding_rms / (_GELU_POWER * self.outer.in_features) ** 0.5)

    def forward(self, slots: Tensor) -> Tensor:
        """Slots as input embeddings, in this module's precision: (slots, slot_dim) -> (slots, dim)."""
        slots = slots.to(self.inner.weight.dtype)
        if self.norm is not None:
            slots = self.norm(slots)
        mapped: Tensor = self.outer(F.gelu(self.inner(slots)))
        return mapped


class Wrap(nn.Module):
    """Puts the same vectors around the slots of every passage.

    They are vectors, not tokens of the prompt, so that they surround a passage wherever a user's prompt names it, and
    the decoder needs no new tokens.
    """

    def __init__(self, config: WrapConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self.before = nn.Parameter(torch.zeros(config.before, dim))
        self.after = nn.Parameter(torch.zeros(config.after, dim))

    def forward(self, embedded: Tensor) -> Tensor:
        """Surround a passage's input embeddings: (slots, dim) -> (positions(slots), dim)."""
        runs = embedded.split(self.config.every or max(1, len(embedded)))
        return torch.cat([part for run in runs for part in (self.before, run, self.after)])
