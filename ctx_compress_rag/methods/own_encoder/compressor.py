"""Pooled hidden states of an encoder with weights of its own (Latent Context Language Models; xRAG)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ctx_compress_rag.methods.base.compressor import (
    Compressor,
    SlotBatch,
    Tokenized,
    batches,
    joined,
    padded,
    windows,
)
from ctx_compress_rag.methods.own_encoder.config import OwnEncoderConfig
from ctx_compress_rag.methods.own_encoder.encoder import OwnEncoder
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.soft_context import SoftContext, pool
from ctx_compress_rag.text.tokenizing import text_ids


class OwnEncoderCompressor(Compressor):
    """A causal encoder reads a passage window by window; a slot is the mean of some hidden states, or a window's last.

    Windows and token counts are of the encoder's tokenizer. A mean of slots is not a slot of another ratio: the map
    that reads them was trained for one.
    """

    def __init__(self, backbone: Backbone, config: OwnEncoderConfig) -> None:
        super().__init__(backbone)
        self.config = config
        self.dim = config.dim
        self.encoder = OwnEncoder(config, backbone)

    def check_ratio(self, ratio: int, stored: int) -> None:
        """Refuse any ratio but the trained one.

        Raises:
            RatioError: one of the two is another.
        """
        self.config.check_ratios(stored, [ratio])

    def bundle_folder_known(self, folder: Path) -> None:
        self.encoder.folder = folder

    def save_files(self, folder: Path) -> None:
        if self.config.encoder is None and (place := self.encoder.place) != folder / "encoder":
            shutil.copytree(str(place), folder / "encoder", dirs_exist_ok=True)

    def forward(self, passages: Sequence[Tokenized], ratios: Sequence[int], window: int) -> Mapping[int, SlotBatch]:
        """Compress a training batch. Nothing here is trained, so slots carry no gradients."""
        return dict.fromkeys(ratios, SlotBatch.of(self._encoded(passages, window, 8192), self.backbone.device))

    def compress(self, passages: Sequence[Tokenized], ratio: int, window: int, batch_tokens: int) -> list[SoftContext]:
        """Compress passages for a store."""
        return self._encoded(passages, window, batch_tokens)

    @torch.inference_mode()
    def _encoded(self, passages: Sequence[Tokenized], window: int, batch_tokens: int) -> list[SoftContext]:
        model, tokenizer = self.encoder()
        bos = [tokenizer.bos_token_id] if self.config.bos else []
        eos = [tokenizer.eos_token_id] if self.config.eos else []
        pieces = windows([text_ids(tokenizer, passage.text) for passage in passages], window)
        read = [[*bos, *ids, *eos] for _, ids in pieces]
        done: dict[int, SoftContext] = {}
        for batch in batches([len(ids) for ids in read], batch_tokens):
            ids, mask = padded([read[i] for i in batch], self.backbone.device)
            hidden = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.float().cpu()
            for i, row in zip(batch, hidden, strict=True):
                length = len(pieces[i][1])
                if self.config.pooling == "last":
                    done[i] = SoftContext(row[len(read[i]) - 1].unsqueeze(0), torch.tensor([length]))
                else:
                    real = row[len(bos) : len(bos) + length]
                    done[i] = SoftContext(*pool(real, torch.ones(length, dtype=torch.long), self.config.ratio))
        return joined([index for index, _ in pieces], [done[i] for i in range(len(pieces))])
