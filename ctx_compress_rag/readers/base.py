"""What every reader does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ctx_compress_rag.backbone import Backbone


class Reader(nn.Module, ABC):
    """Maps stored slots into the decoder's embedding space and prepares the decoder to read them."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        # A plain tuple hides the shared decoder from nn.Module: its weights are not this module's.
        self._backbone = (backbone,)

    @property
    def backbone(self) -> Backbone:
        """The decoder this reader was made for."""
        return self._backbone[0]

    @abstractmethod
    def trained_parameters(self) -> list[nn.Parameter]:
        """Make what this reader trains trainable and return it."""

    @abstractmethod
    def initialise(self, slot_rms: float) -> None:
        """Prepare an untrained reader for slots of this root mean square."""

    @abstractmethod
    def forward(self, slots: Tensor, token_counts: Tensor) -> Tensor:
        """Slots as the decoder's input embeddings.

        Shape: (slots, dim), (slots,) -> (slots, decoder dim)
        """

    @abstractmethod
    def decoder(self) -> AbstractContextManager[Any]:
        """The transformers model that reads slots, held for this thread within the context."""

    @abstractmethod
    def saved_state(self) -> dict[str, Tensor]:
        """The tensors a bundle stores for this reader, adapters excepted."""

    @abstractmethod
    def load_saved_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `saved_state` gave."""
