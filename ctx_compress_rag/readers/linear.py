"""A linear map on slots and a tuned decoder (paper 001, section 5.1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ctx_compress_rag.backbone import Backbone, lora_config
from ctx_compress_rag.config import TuneConfig
from ctx_compress_rag.part import load_parameters
from ctx_compress_rag.readers.base import Reader

ADAPTER = "reader"


class LinearReader(Reader):
    """z W^T for each slot z, read by the decoder with LoRA (or a full copy of its weights).

    Args:
        backbone: the decoder.
        slot_dim: width of a stored slot.
        tune: how the decoder is adapted.
        linear: leave False for the paper's ablation without W (then slot_dim is the decoder's width).
    """

    def __init__(self, backbone: Backbone, slot_dim: int, tune: TuneConfig, linear: bool = True) -> None:
        super().__init__(backbone)
        self.tune = tune
        self.projection = nn.Linear(slot_dim, backbone.dim, bias=False) if linear else None
        self.own: nn.Module | None = None
        if tune.mode == "lora":
            backbone.add_adapter(ADAPTER, lora_config(tune))
        elif tune.mode == "full":
            self.own = backbone.copy_model()
        self.to(backbone.device)
        self.requires_grad_(False)

    def initialise(self, slot_rms: float) -> None:
        """Start the map as a multiple of the identity that gives slots the size of token embeddings.

        Hidden states and embeddings differ in size by up to two orders of magnitude; a decoder that
        meets inputs of a strange size learns to ignore them.

        Args:
            slot_rms: root mean square of the compressor's slot entries.
        """
        if self.projection is None:
            return
        with torch.no_grad():
            nn.init.eye_(self.projection.weight)
            self.projection.weight.mul_(self.backbone.embedding_rms() / max(slot_rms, 1e-6))

    def trained_parameters(self) -> list[nn.Parameter]:
        """Make what this reader trains trainable and return it."""
        trained: list[nn.Parameter] = []
        if self.projection is not None:
            self.projection.requires_grad_(True)
            trained += self.projection.parameters()
        if self.own is not None:
            self.own.train().requires_grad_(True)
            self.own.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
            trained += [p for p in self.own.parameters() if p.requires_grad]
        elif self.tune.mode == "lora":
            trained += self.backbone.train_adapter(ADAPTER)
        return trained

    def forward(self, slots: Tensor, token_counts: Tensor) -> Tensor:
        """Slots as the decoder's input embeddings; `token_counts` is not used."""
        return slots if self.projection is None else self.projection(slots.to(self.projection.weight.dtype))

    @contextmanager
    def decoder(self, slot_mask: Tensor) -> Iterator[Any]:
        """The decoder with this reader's adapter, or this reader's own copy of it; `slot_mask` is not used."""
        with self.backbone.use(ADAPTER if self.tune.mode == "lora" else None) as model:
            yield model if self.own is None else self.own

    def saved_state(self) -> dict[str, Tensor]:
        """The map, and the decoder's copy where there is one."""
        shared = self.backbone.embeddings.weight
        return {name: p.detach().cpu().contiguous() for name, p in self.named_parameters() if p is not shared}

    def load_saved_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `saved_state` gave."""
        load_parameters(self, state, self.saved_state().keys(), "reader")
