"""Settings of compression tokens."""

from __future__ import annotations

from typing import Literal

from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig


class CompressionTokensConfig(MethodConfig):
    """Compression tokens (Simple Context Compression, section 5.1): one learned token, repeated once for each slot.

    `attention` is how they see each other and the text: "causal" as the decoder does, or
    "bidirectional" among compression tokens, causal over the text.
    """

    name: Literal["compression_tokens"] = "compression_tokens"
    attention: Literal["causal", "bidirectional"] = "bidirectional"
    encoder: TuneConfig = TuneConfig()
    decoder: TuneConfig = TuneConfig()
