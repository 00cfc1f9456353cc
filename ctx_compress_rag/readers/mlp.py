"""A two-layer perceptron on slots, read by a frozen decoder (paper 002, section 3.2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.backbone import Backbone
from ctx_compress_rag.part import load_parameters
from ctx_compress_rag.readers.base import Reader

# Root mean square of GELU(x) for x from a standard normal distribution.
_GELU_RMS = 0.652


class MlpReader(Reader):
    """c = W_2 GELU(W_1 z + b_1) + b_2 for each slot z (eq. 13); the decoder is frozen and has no adapter.

    The hidden layer has the decoder's width. The paper names neither that width nor the activation.

    Args:
        backbone: the decoder.
        slot_dim: width of a stored slot.
    """

    def __init__(self, backbone: Backbone, slot_dim: int) -> None:
        super().__init__(backbone)
        self.hidden = nn.Linear(slot_dim, backbone.dim)
        self.out = nn.Linear(backbone.dim, backbone.dim)
        self.to(backbone.device)
        self.requires_grad_(False)

    def initialise(self, slot_rms: float) -> None:
        """Start so that slots of this size become embeddings of the decoder's own size.

        Weights are drawn so that the hidden layer sees values of root mean square 1, and the output has
        that of token embeddings; biases start at zero.

        Args:
            slot_rms: root mean square of the compressor's slot entries.
        """
        nn.init.normal_(self.hidden.weight, std=self.hidden.in_features**-0.5 / max(slot_rms, 1e-6))
        nn.init.normal_(self.out.weight, std=self.out.in_features**-0.5 * self.backbone.embedding_rms() / _GELU_RMS)
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.out.bias)

    def trained_parameters(self) -> list[nn.Parameter]:
        """Make the perceptron trainable and return its parameters."""
        return list(self.requires_grad_(True).parameters())

    def forward(self, slots: Tensor, token_counts: Tensor) -> Tensor:
        """Slots as the decoder's input embeddings; `token_counts` is not used."""
        embedded: Tensor = self.out(F.gelu(self.hidden(slots.to(self.hidden.weight.dtype))))
        return embedded

    @contextmanager
    def decoder(self, slot_mask: Tensor) -> Iterator[Any]:
        """The decoder as it is; `slot_mask` is not used."""
        with self.backbone.use(None) as model:
            yield model

    def saved_state(self) -> dict[str, Tensor]:
        """The perceptron's weights."""
        return {name: p.detach().cpu().contiguous() for name, p in self.named_parameters()}

    def load_saved_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `saved_state` gave."""
        load_parameters(self, state, self.saved_state().keys(), "reader")
