"""Maps from stored slots to the decoder's input embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# E[GELU(x)^2] for standard normal x.
_GELU_POWER = 0.42522

# GELU(x) is x / 2 + 0.4 x^2 and smaller terms: for inputs of this standard deviation it is nine tenths linear.
_NEARLY_LINEAR = 0.3

# Share of the inputs' mean variance, added to each direction's: a few passages hardly vary in some directions.
_RIDGE = 1e-3


class LinearMap(nn.Linear):
    """z W^T for each slot z (Simple Context Compression, section 5.1; W_align of Read As Human, eq. 5)."""

    def __init__(self, slot_dim: int, dim: int) -> None:
        super().__init__(slot_dim, dim, bias=False)

    def initialize(self, slot_rms: float, embedding_rms: float) -> None:
        """Initialize as a multiple of the identity that gives slots the root mean square of token embeddings.

        Hidden states and embeddings differ in size by up to two orders of magnitude; a decoder learns to
        ignore inputs of an unusual size.
        """
        with torch.no_grad():
            nn.init.eye_(self.weight)
            self.weight.mul_(embedding_rms / max(slot_rms, 1e-6))

    def forward(self, slots: Tensor) -> Tensor:
        """Slots as the decoder's input embeddings, in this module's precision.

        Shape: (slots, slot_dim) -> (slots, dim)
        """
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

    def fit(self, slots: Tensor, embeddings: Tensor) -> None:
        """Initialize as the least-squares map from slots to embeddings: first a linear map, then through GELU.

        Not in the papers, which do not say how their maps are initialized. A frozen decoder can only read inputs
        that look like its embeddings, and distillation hardly gets there from a random map.

        Shape: (slots, slot_dim), (slots, dim)
        """
        with torch.no_grad():
            slots = self._inputs(slots)
            weight, bias = _least_squares(slots, embeddings)
            line = slots.double() @ weight.T + bias
            center = line.mean(0)
            scale = _NEARLY_LINEAR / line.std().clamp(min=1e-12)
            self.inner.weight.copy_(scale * weight)
            self.inner.bias.copy_(scale * (bias - center))
            weight, bias = _least_squares(F.gelu(scale * (line - center)), embeddings)
            self.outer.weight.copy_(weight)
            self.outer.bias.copy_(bias)

    def forward(self, slots: Tensor) -> Tensor:
        """Slots as the decoder's input embeddings, in this module's precision.

        Shape: (slots, slot_dim) -> (slots, dim)
        """
        mapped: Tensor = self.outer(F.gelu(self.inner(self._inputs(slots))))
        return mapped

    def _inputs(self, slots: Tensor) -> Tensor:
        slots = slots.to(self.inner.weight.dtype)
        return slots if self.norm is None else self.norm(slots)


def _least_squares(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the affine map with the least squared error, with slight ridge regularization.

    Shape: (rows, in), (rows, out) -> (out, in), (out,), in float64
    """
    inputs, outputs = inputs.double(), outputs.double()
    mean_in, mean_out = inputs.mean(0), outputs.mean(0)
    centered = inputs - mean_in
    gram = centered.T @ centered
    ridge = _RIDGE * gram.diagonal().mean() + 1e-12
    gram.diagonal().add_(ridge)
    weight = torch.linalg.solve(gram, centered.T @ (outputs - mean_out)).T
    return weight, mean_out - weight @ mean_in
