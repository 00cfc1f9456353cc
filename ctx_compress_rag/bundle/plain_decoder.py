"""A decoder that reads text alone: what a bundle adds a compressor and a reader to."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from ctx_compress_rag.bundle.files import TEACHER
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.identity import weights_digest
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.process_bound import ProcessBound
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR


class PlainDecoder(ProcessBound):
    """A causal LM and its tokenizer.

    Attributes:
        backbone: the decoder's weights.
        decoder_name: its hub id, folder or file; None if it has none.
        separator: what stands between two passages.
        answer_prefix: what every answer to a prompt with slots begins with.
    """

    def __init__(
        self,
        backbone: Backbone,
        decoder_name: str | None = None,
        separator: str = PASSAGE_SEPARATOR,
        answer_prefix: str = "",
    ) -> None:
        self.backbone = backbone
        self.decoder_name = decoder_name
        self.separator = separator
        self.answer_prefix = answer_prefix

    @classmethod
    def load(
        cls, decoder: str | Path | GgufDecoder, revision: str | None = None, device: str | torch.device | None = None
    ) -> PlainDecoder:
        """Load a decoder alone: a folder, hub id or GGUF file; raises as `load_decoder`."""
        return PlainDecoder(Backbone(*load_decoder(decoder, revision, device)), str(decoder))

    @property
    def tokenizer(self) -> Any:
        """The decoder's tokenizer, padding on the left."""
        return self.backbone.tokenizer

    def positions(self, slots: int) -> int:
        """Positions of the decoder that so many slots of a passage take."""
        return slots

    @property
    def weights_digest(self) -> str:
        """64 hex digits that identify the weights that read text, by a sample of each."""
        return weights_digest(self.backbone.model, TEACHER)

    @property
    def fingerprint(self) -> str:
        """64 hex digits that identify the decoder."""
        return self.weights_digest

    def text_decoder(self) -> AbstractContextManager[Any]:
        """A context manager that locks the decoder for this thread, set up to read plain text (the teacher)."""
        return self.backbone.use(TEACHER if TEACHER in self.backbone.adapters else None)
