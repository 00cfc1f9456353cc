"""The base class of readers."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ctx_compress_rag.methods.base.part import Part


class Reader(Part):
    """Maps stored slots into the decoder's embedding space and prepares the decoder to read them."""

    side = "reader"

    @abstractmethod
    def initialize(self, slot_rms: float) -> None:
        """Initialize an untrained reader for slots of this root mean square."""

    @abstractmethod
    def fit(self, slots: Tensor, embeddings: Tensor) -> None:
        """Initialize an untrained reader so that it maps slots as closely as possible to these embeddings.

        Shape: (slots, dim), (slots, decoder dim)

        Raises:
            ConfigError: the reader has nothing to fit.
        """

    @abstractmethod
    def forward(self, slots: Tensor, token_counts: Tensor) -> Tensor:
        """A passage's slots as the decoder's input embeddings.

        Shape: (slots, dim), (slots,) -> (positions(slots), decoder dim)
        """

    def positions(self, slots: int) -> int:
        """How many input embeddings `forward` makes of this many slots of a passage."""
        return slots

    @abstractmethod
    def decoder(self, slot_mask: Tensor) -> AbstractContextManager[Any]:
        """A context manager that locks the transformers model that reads slots for this thread.

        Args:
            slot_mask: bool (batch, length), True at the slots of the prompts that the model will read.
        """
