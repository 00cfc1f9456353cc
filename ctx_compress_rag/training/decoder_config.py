"""Recipes that train a decoder on questions with their full text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.strict import Strict
from ctx_compress_rag.training.config import PackingConfig, Recipe, check_packed


class ScratchDecoder(Strict):
    """A decoder made from scratch: a transformers configuration and a tokenizer of its own."""

    config: dict[str, Any]
    vocab_size: int = Field(ge=261)


class DecoderRecipe(Recipe):
    """Train a decoder, not a bundle.

    Attributes:
        scratch: a decoder to make from scratch.
        decoder: a folder, hub id or GGUF file to continue from, instead of `scratch`.
        revision: the decoder's revision on the hub.
    """

    scratch: ScratchDecoder | None = None
    decoder: str | GgufDecoder | None = None
    revision: str | None = None

    @model_validator(mode="after")
    def _shares_all(self) -> DecoderRecipe:
        if self.optim.shard == "frozen":
            raise ValueError(f"shard: frozen is for stages that train a bundle: for stage {self.stage} use shard: all")
        return self


class PointingConfig(Strict):
    """Supervised attention of a decoder made from scratch; see `training.stages.pointers`. Layers count from 0."""

    weight: float = Field(default=1.0, gt=0)
    name_layer: int = Field(default=1, ge=0)
    copy_layer: int = Field(default=2, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> PointingConfig:
        if self.copy_layer <= self.name_layer:
            raise ValueError(f"copy_layer {self.copy_layer} must come after name_layer {self.name_layer}")
        return self


class TeacherRecipe(DecoderRecipe):
    """Fine-tune (or train from scratch) the decoder on question answering with full text.

    `decoder` may be the folder of a LoRA teacher that an earlier stage made: its adapter is then trained further.

    Attributes:
        packing: pack prompts into rows; prompts without room in their batch are left out. For `tune.mode: lora`.
    """

    stage: Literal["teacher"]
    tune: TuneConfig = TuneConfig()
    context_loss_weight: float = Field(default=0.0, ge=0)
    pointing: PointingConfig | None = None
    packing: PackingConfig | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> TeacherRecipe:
        if self.packing and (self.tune.mode != "lora" or self.context_loss_weight):
            raise ValueError("packing needs tune.mode: lora and trains on answers only: leave out context_loss_weight")
        if self.packing:
            check_packed(self.optim)
        if self.pointing and (self.data.files or self.tune.mode != "full"):
            raise ValueError("pointing needs data.world, which says what a question is about, and tune.mode: full")
        if (self.decoder is None) == (self.scratch is None):
            raise ValueError("give either decoder (a folder, hub id or GGUF file) or scratch")
        if self.scratch and self.tune.mode != "full":
            raise ValueError("a decoder from scratch needs tune.mode: full")
        return self
