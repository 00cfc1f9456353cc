"""A decoder without compressor and reader, which reads only text."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from ctx_compress_rag.bundle.files import TEACHER
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.identity import decoder_weights_digest
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.process_bound import ProcessBound
from ctx_compress_rag.prompt import Side
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR


class PlainDecoder(ProcessBound):
    """A causal LM and its tokenizer, without compressor and reader; the base class of `Bundle`."""

    config: Any = None  # of a bundle
    sides: tuple[Side, ...] = ()  # of a bundle

    def __init__(
        self,
        backbone: Backbone,
        decoder_name: str | None = None,
        separator: str = PASSAGE_SEPARATOR,
        answer_prefix: str = "",
    ) -> None:
        self.backbone = backbone
        self.decoder_name = decoder_name  # hub id, folder or file; None for a decoder that a bundle ships
        self.separator = separator  # between two passages in a prompt
        self.answer_prefix = answer_prefix  # with which every answer to a prompt with slots begins

    @classmethod
    def load(
        cls, decoder: str | Path | GgufDecoder, revision: str | None = None, device: str | torch.device | None = None
    ) -> "PlainDecoder":
        """Load a decoder without a bundle, from a folder, the hub or a GGUF file. Raise errors as `load_decoder`."""
        return PlainDecoder(Backbone(*load_decoder(decoder, revision, device)), str(decoder))

    @property
    def tokenizer(self) -> Any:
        """The decoder's tokenizer, which pads on the left."""
        return self.backbone.tokenizer

    def positions(self, slots: int) -> int:
        """Return how many positions of a prompt a passage of so many slots takes."""
        return slots

    @property
    def window(self) -> int | None:
        """The most positions of a prompt and its answer; None if the decoder has no limit."""
        return self.backbone.window

    @property
    def generation_config(self) -> Any:
        """The decoder's own settings of generation, in transformers' form."""
        return self.backbone.generation_config

    @property
    def weights_digest(self) -> str:
        """64 hex digits that identify the decoder's weights, by a sample of each tensor, with the teacher's adapter."""
        return decoder_weights_digest(self.backbone.model, TEACHER)

    @property
    def fingerprint(self) -> str:
        """64 hex digits that identify the decoder."""
        return self.weights_digest

    def text_decoder(self) -> AbstractContextManager[Any]:
        """Return a context manager that gives the model (the teacher), locked for this thread, to read plain text."""
        return self.backbone.use(TEACHER if TEACHER in self.backbone.adapters else None)
