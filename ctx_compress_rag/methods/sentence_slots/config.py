"""Settings of sentence slots, and of what becomes a slot."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig


class SentenceUnits(MethodConfig):
    """The sentence encoder, and the units of text that become its vectors (ArcAligner, sections 3.1 and 4.1).

    Attributes:
        encoder: a sentence-transformers model: a hub id, a folder, or "minilm" for the packaged one.
        encoder_revision: a hub revision.
        encoder_dim: the width of its vectors; given here so that reading stored slots needs no encoder.
        unit: what a slot stands for: a "sentence"; a "passage" (xRAG); or, with "tokens", as many neighboring
            sentences, or as much of one, as fit into `ratio` tokens. The ratio has no effect on the first two.
        language: ISO 639-1 code for the sentence splitter.
    """

    encoder: str = Field(default="sentence-transformers/all-MiniLM-L6-v2", min_length=1)
    encoder_revision: str | None = None
    encoder_dim: int = Field(default=384, gt=0)
    unit: Literal["sentence", "passage", "tokens"] = "sentence"
    language: str = "en"


class SentenceSlotsConfig(SentenceUnits):
    """Sentence vectors as slots (ArcAligner, sections 3.1-3.2); xRAG with one slot per passage.

    The decoder is frozen, as in xRAG: only the projector is trained.
    """

    name: Literal["sentence_slots"] = "sentence_slots"
    decoder: TuneConfig = TuneConfig(mode="frozen")
