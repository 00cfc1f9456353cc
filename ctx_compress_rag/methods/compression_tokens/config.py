"""Settings of compression tokens."""

from __future__ import annotations

from typing import Literal

from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig


class CompressionTokensConfig(MethodConfig):
    """Compression tokens (Simple Context Compression, section 5.1): one learned token, repeated once for each slot.

    `attention` is how compression tokens see each other: "causal", as in the decoder, or "bidirectional". The text
    is always read causally.
    """

    name: Literal["compression_tokens"] = "compression_tokens"
    attention: Literal["causal", "bidirectional"] = "bidirectional"
    encoder: TuneConfig = TuneConfig()
    decoder: TuneConfig = TuneConfig()
