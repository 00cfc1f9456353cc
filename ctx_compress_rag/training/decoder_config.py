"""The recipe that trains a decoder on questions with their full text."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.training.config import PackingConfig, Recipe, check_packed


class TeacherRecipe(Recipe):
    """Fine-tune a decoder, not a bundle, on question answering with full text.

    Attributes:
        decoder: a folder, hub id or GGUF file; or the folder of a LoRA teacher that an earlier stage made, whose
            adapter is then trained further.
        revision: the decoder's revision on the hub.
        packing: pack prompts into rows; prompts without room in their batch are left out. For `tune.mode: lora`.
    """

    stage: Literal["teacher"]
    decoder: str | GgufDecoder
    revision: str | None = None
    tune: TuneConfig = TuneConfig()
    context_loss_weight: float = Field(default=0.0, ge=0)
    packing: PackingConfig | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> TeacherRecipe:
        if self.packing and (self.tune.mode != "lora" or self.context_loss_weight):
            raise ValueError("packing needs tune.mode: lora and trains on answers only: leave out context_loss_weight")
        if self.packing:
            check_packed(self.optim)
        if self.optim.shard == "frozen":
            raise ValueError(f"shard: frozen is for stages that train a bundle: for stage {self.stage} use shard: all")
        return self
