"""The settings of RAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from ctx_compress_rag.errors import RatioError
from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig


class RamConfig(MethodConfig):
    """The settings of RAM (Read As Human): the segments that a question needs stay text, and the rest is skimmed.

    The paper names no adapters; we read this as training encoder and decoder fully. `close_reading: false` skims every
    segment. `skimming` pools a skimmed segment with weights from the question ("query"), as a plain "average", or drops
    it ("none"). These switches are the ablations of section 4.5.
    """

    name: Literal["ram"] = "ram"
    segment_tokens: int = Field(default=50, gt=0)
    encoder: TuneConfig = TuneConfig(mode="full")
    decoder: TuneConfig = TuneConfig(mode="full")
    close_reading: bool = True
    skimming: Literal["query", "average", "none"] = "query"

    @model_validator(mode="after")
    def _something_is_read(self) -> RamConfig:
        if not self.close_reading and self.skimming == "none":
            raise ValueError("close_reading: false and skimming: none leave nothing to read: switch off one of them")
        return self

    def check_ratios(self, base_ratio: int, ratios: Sequence[int]) -> None:
        """Check the ratios. `ratios` say how many times shorter a prompt's context becomes, and a segment is one slot.

        Raises:
            RatioError: one of `ratios` is below 2, or `base_ratio` is not `segment_tokens`.
        """
        if base_ratio != self.segment_tokens:
            raise RatioError(
                f"ratio {base_ratio}: ram stores one vector for each segment of {self.segment_tokens} tokens: leave "
                "out the store's ratio, and give one with each question; train with stage: ram and this base_ratio"
            )
        if (least := min(ratios)) < 2:
            raise RatioError(f"ratio={least}: a ram bundle needs a ratio of 2 or more")
