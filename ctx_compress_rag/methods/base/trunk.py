"""Compressors that encode with the decoder's own trunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ctx_compress_rag.backbone import Backbone
from ctx_compress_rag.methods.base.compressor import TokenCompressor
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.methods.base.part import load_parameters, train_copy

ADAPTER = "compressor"


class TrunkCompressor(TokenCompressor):
    """A compressor whose encoder is the decoder without its head: with LoRA, as a copy of its own, or frozen.

    Args:
        backbone: the decoder.
        tune: how the encoder is adapted (paper 001, section 5.1: LoRA apart from the decoder's).
    """

    def __init__(self, backbone: Backbone, tune: TuneConfig) -> None:
        super().__init__(backbone)
        self.tune = tune
        self.dim = backbone.dim
        self.encoder: nn.Module | None = None
        if tune.mode == "lora":
            backbone.add_adapter(ADAPTER, lora_config(tune))
        elif tune.mode == "full":
            self.encoder = backbone.copy_model().base_model

    def trained_parameters(self) -> list[nn.Parameter]:
        """Make what the encoder trains trainable and return it."""
        if self.encoder is not None:
            return train_copy(self.encoder)
        return self.backbone.train_adapter(ADAPTER) if self.tune.mode == "lora" else []

    @contextmanager
    def trunk(self) -> Iterator[Any]:
        """The encoder, a transformers model without a head, held for this thread within the context."""
        with self.backbone.use(ADAPTER if self.tune.mode == "lora" else None) as model:
            yield model.base_model if self.encoder is None else self.encoder

    def saved_state(self) -> dict[str, Tensor]:
        """This module's own weights; the encoder's embeddings are the decoder's."""
        shared = self.backbone.embeddings.weight
        return {name: p.detach().cpu().contiguous() for name, p in self.named_parameters() if p is not shared}

    def load_saved_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `saved_state` gave."""
        load_parameters(self, state, self.saved_state().keys(), ADAPTER)
