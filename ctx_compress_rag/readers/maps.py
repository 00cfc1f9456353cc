"""Maps from stored slots to the decoder's input embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# E[GELU(x)^2] for standard normal x.
_GELU_POWER = 0.42522


class LinearMap(nn.Linear):
    """z W^T for each slot z (paper 001, section 5.1; W_align of paper 004, eq. 5).

    Args:
        slot_dim: width of a slot.
        dim: width of the decoder's embeddings.
    """

    def __init__(self, slot_dim: int, dim: int) -> None:
        super().__init__(slot_dim, dim, bias=False)

    def initialise(self, slot_rms: float, embedding_rms: float) -> None:
        """Start as a multiple of the identity that gives slots the size of token embeddings.

        Hidden states and embeddings differ in size by up to two orders of magnitude; a decoder that
        meets inputs of a strange size learns to ignore them.

        Args:
            slot_rms: root mean square of the slots' entries.
            embedding_rms: that of the decoder's input embeddings.
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

    It is the MLP of paper 002, eq. 13, and W_psi of paper 000, eq. 1, which says only "lightweight projector":
    this is xRAG's. A sentence encoder's space is not a rotation of the decoder's, so one linear map is too
    little, and its vectors come ready-made, so there is nothing before the projector that could learn the
    rest. The papers name neither the activation nor the width between, here the decoder's.

    Args:
        slot_dim: width of a slot.
        dim: width of the decoder's embeddings, and of the layer between.
    """

    def __init__(self, slot_dim: int, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(slot_dim, dim)
        self.outer = nn.Linear(dim, dim)

    def initialise(self, slot_rms: float, embedding_rms: float) -> None:
        """Draw weights that keep slots apart and give them the size of token embeddings; biases are zero.

        Args:
            slot_rms: root mean square of the slots' entries.
            embedding_rms: that of the decoder's input embeddings.
        """
        with torch.no_grad():
            for layer in (self.inner, self.outer):
                layer.bias.zero_()
            # The inner layer's outputs are then of unit variance, as GELU wants them.
            self.inner.weight.normal_(std=1 / (max(slot_rms, 1e-6) * self.inner.in_features**0.5))
            self.outer.weight.normal_(std=embedding_rms / (_GELU_POWER * self.outer.in_features) ** 0.5)

    def forward(self, slots: Tensor) -> Tensor:
        """Slots as the decoder's input embeddings, in this module's precision.

        Shape: (slots, slot_dim) -> (slots, dim)
        """
        mapped: Tensor = self.outer(F.gelu(self.inner(slots.to(self.inner.weight.dtype))))
        return mapped
