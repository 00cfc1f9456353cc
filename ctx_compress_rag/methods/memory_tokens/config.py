"""Settings of memory tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ctx_compress_rag.methods.base.config import OneRatioConfig, TuneConfig, WrapConfig


class MemoryTokensConfig(OneRatioConfig):
    """Memory tokens: a fixed number of learned vectors after each window of text, however short it is.

    Attributes:
        slots: memory tokens per window, whose length is `ratio` times this number.
        begin: learned vectors before each window.
        bos: where the decoder's BOS comes: before every "window", before the "first" of a passage, as one of its
            tokens, or "never".
        eos: whether the decoder's end token comes after each window.
        equal: cut a passage into windows of equal length (ICAE), not into full ones and a rest.
        wrap: what the decoder reads around the slots.
    """

    name: Literal["memory_tokens"] = "memory_tokens"
    slots: int = Field(gt=0)
    begin: int = Field(default=0, ge=0)
    bos: Literal["window", "first", "never"] = "window"
    eos: bool = False
    equal: bool = False
    encoder: TuneConfig = TuneConfig()
    decoder: TuneConfig = TuneConfig()
    wrap: WrapConfig = WrapConfig()

    @property
    def window(self) -> int:
        """Source tokens of a full window."""
        return self.ratio * self.slots
