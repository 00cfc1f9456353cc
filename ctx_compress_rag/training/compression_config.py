"""Recipes that train a compressor and its reader, a class for each stage."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import AliasChoices, Field, model_validator

from ctx_compress_rag.data.config import SourceConfig
from ctx_compress_rag.methods.registry import AnyMethodConfig
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.soft_context import check_window
from ctx_compress_rag.strict import Strict
from ctx_compress_rag.text.templates import PARAPHRASES
from ctx_compress_rag.training.config import PackingConfig, Recipe, check_packed


class RatioStep(Strict):
    """From `step` on, train all of these ratios, or draw `sample` of them for each step or for each example.

    One for each example is the ablation of "Simple Context Compression" (table 3). RAM always draws for each question;
    its recipes call the ratios `reductions`.
    """

    step: int = Field(ge=0)
    ratios: list[int] = Field(min_length=1, validation_alias=AliasChoices("ratios", "reductions"))
    sample: int | None = Field(default=None, gt=0)
    each: Literal["step", "example"] = "step"


class CompressionRecipe(Recipe):
    """Train a compressor and its reader: the settings that all such stages share.

    Starts from untrained weights for `decoder`, or from the `bundle` that an earlier stage made. A
    `method` given with a bundle replaces the bundle's settings, and must fit its weights.

    `fit_passages` first fits an untrained reader by least squares on that many of the data's passages, so that it
    maps a slot of one token to that token's embedding. It is ours, not a paper's, for readers with a map of two layers
    before a frozen decoder, which can only read vectors that look like its embeddings.

    `copy_decoder: false` makes the bundle name the folder given as `decoder`, instead of holding a copy of it.
    `reader_from_teacher` initialises the reader's LoRA with the teacher's, which can already read text: also ours.
    `int8` saves the bundle's matrices in 8 bits; `sources`, `decoder_licence` and `limits` go into its model card.

    Without a `curriculum` every step trains all `ratios`. A curriculum is ours: decoders as small as the demo's do not
    learn to read slots if they start at coarse ratios.
    """

    recites: ClassVar[bool] = False
    """Whether the stage trains on passages only, each once, and ignores the questions."""

    name: str
    reads: str = "general text"
    bundle: Path | None = None
    decoder: str | GgufDecoder | None = None
    copy_decoder: bool = True
    revision: str | None = None
    teacher: Path | None = None
    method: AnyMethodConfig | None = None
    base_ratio: int = Field(default=4, gt=0)
    ratios: list[int] = Field(default=[4, 8, 16, 32, 64, 128], min_length=1)
    window: int = Field(default=1024, gt=0)
    curriculum: list[RatioStep] = []
    fit_passages: int = Field(default=0, ge=0)
    reader_from_teacher: bool = False
    int8: bool = False
    sources: list[SourceConfig] = []
    decoder_licence: str | None = None
    limits: list[str] = []

    @model_validator(mode="after")
    def _fits_together(self) -> CompressionRecipe:
        if (self.bundle is None) == (self.decoder is None):
            raise ValueError("give either decoder (a folder, hub id or GGUF file) or bundle (made by an earlier stage)")
        if self.decoder and self.method is None:
            raise ValueError("a new bundle needs a method: give one")
        if self.bundle and self.fit_passages:
            raise ValueError("fit_passages is for an untrained reader, but a bundle's is trained: leave it out")
        if self.reader_from_teacher and self.teacher is None:
            raise ValueError("reader_from_teacher needs a teacher that the reader can start from: give teacher")
        if self.bundle and (self.revision or self.teacher):
            raise ValueError("a bundle has its own revision and teacher: leave them out")
        if self.method is not None:  # otherwise it is the bundle's, which may not exist until an earlier stage has run
            self.method.check_ratios(self.base_ratio, self.ratios)
        # Training pools each of a passage's windows separately; a store merges slots across windows.
        for ratio in self._slot_ratios():
            check_window(ratio, self.window)
        if self.optim.shard and any(part.each == "example" for part in self.curriculum):
            raise ValueError(
                "shard needs all processes to make the same passes, but with `each: example` one of them may have no "
                "example for a ratio: leave out shard or `each: example`"
            )
        return self

    def _slot_ratios(self) -> list[int]:
        """Every ratio that passages are compressed at."""
        return [self.base_ratio, *self.ratios, *(ratio for part in self.curriculum for ratio in part.ratios)]

    def curriculum_at(self, step: int) -> RatioStep:
        """The part of the curriculum that applies at an optimiser step."""
        begun = [part for part in sorted(self.curriculum, key=lambda part: part.step) if part.step <= step]
        return begun[-1] if begun else RatioStep(step=0, ratios=self.ratios)

    def ratios_at(self, step: int) -> list[int]:
        """The ratios to train at an optimiser step; the same at every call."""
        current = self.curriculum_at(step)
        if current.sample is None or current.sample >= len(current.ratios) or current.each == "example":
            return current.ratios
        return sorted(random.Random(f"{self.seed}:{step}").sample(current.ratios, current.sample))


class RepeatStep(Strict):
    """From `step` on, this share of a batch's sequences repeats a passage; the others answer questions."""

    step: int = Field(ge=0)
    share: float = Field(ge=0, le=1)


class RepeatAndAnswerRecipe(CompressionRecipe):
    """Train on answers and repeated passages, read from slots, in packed rows; see `training.objectives.packed`.

    `data.files` hold the questions; their passages and those of `data.texts` are repeated. Each sequence draws one
    of the step's ratios; a ratio that is listed twice is drawn twice as often.

    Attributes:
        packing: the rows.
        repeat: the share of a batch's sequences that repeat a passage, for each part of the training.
    """

    repeats_texts = True
    stage: Literal["repeat_and_answer"]
    window: int = Field(default=384, gt=0)
    packing: PackingConfig = PackingConfig()
    repeat: list[RepeatStep] = Field([RepeatStep(step=0, share=0.5)], min_length=1)

    @model_validator(mode="after")
    def _trains_what_it_serves(self) -> RepeatAndAnswerRecipe:
        if not self.data.files:
            raise ValueError("stage repeat_and_answer needs questions: give data.files")
        check_packed(self.optim)
        if self.window != self.packing.length:
            raise ValueError(f"window {self.window} must be packing.length, {self.packing.length}")
        return self

    def repeat_share_at(self, step: int) -> float:
        """The share of repeated passages at an optimiser step."""
        return max((r for r in self.repeat if r.step <= step), key=lambda r: r.step, default=self.repeat[0]).share


class TaughtRecipe(CompressionRecipe):
    """Settings of stages that learn from a teacher: the decoder that reads the full text.

    With `teacher_top` the teacher reads each example once. For each answer token, that many of its most likely tokens
    are kept in a folder of `output`, with the total probability of all others; the student learns to match these.
    None is the paper's way: the student matches the whole distribution, computed at every step.
    """

    teacher_top: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _same_passes(self) -> TaughtRecipe:
        if self.teacher_top and self.optim.shard:
            raise ValueError(
                "shard needs all processes to make the same passes, but with teacher_top one of them may not need the "
                "teacher: leave out shard or teacher_top"
            )
        return self


class DistillationRecipe(TaughtRecipe):
    """Distillation from the full-text teacher (Simple Context Compression), summed over ratios (eq. 6)."""

    stage: Literal["distillation"]
    reconstruction_weight: float = Field(default=0.0, ge=0)
    repeat_per_batch: int = Field(default=8, gt=0)


class NextTokenRecipe(CompressionRecipe):
    """The likelihood of the text that follows a compressed beginning (ComprExIT, section 3.3).

    Compresses `data.max_context_tokens` and predicts `data.max_answer_tokens`; questions are ignored.
    """

    asks = False
    stage: Literal["next_token"]


class ReconstructionRecipe(CompressionRecipe):
    """The likelihood of passages reconstructed from their slots (ArcAligner, stage I, eq. 10).

    Each distinct passage of the data is a row of its own; questions are ignored. Passages, and so the answers, are
    truncated to `data.max_context_tokens`.

    Attributes:
        paraphrases: prompts with {context} in place of the slots; one is drawn for each passage (table 7).
    """

    asks = False
    recites = True
    stage: Literal["reconstruction"]
    paraphrases: list[str] = Field(default=list(PARAPHRASES), min_length=1)

    @model_validator(mode="after")
    def _slots_have_a_place(self) -> ReconstructionRecipe:
        for template in self.paraphrases:
            if template.count("{context}") != 1:
                raise ValueError(f"a paraphrase needs exactly one {{context}}: {template!r}")
        return self


class AnswerRecipe(TaughtRecipe):
    """The likelihood of answers read from slots (fine-tuning in ArcAligner and ComprExIT).

    `self_distillation` is the weight of KL(decoder with text || decoder with slots) on the same tokens (xRAG).
    """

    stage: Literal["answer"]
    self_distillation: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _has_a_teacher(self) -> AnswerRecipe:
        if self.teacher_top and not self.self_distillation:
            raise ValueError("teacher_top needs self_distillation: without it no teacher is used")
        return self


class RamRecipe(CompressionRecipe):
    """Learn to answer from kept and skimmed segments, and which segments to keep (Read As Human, eq. 7-9).

    One run trains all reductions: each question draws one of the step's.

    Attributes:
        base_ratio: the method's `segment_tokens`.
        ratios: `reductions` in a recipe: the paper's alpha, how many times shorter a prompt's context becomes.
        temperature: tau of eq. 8.
        contrastive: false is the paper's ablation without the contrastive loss.
    """

    stage: Literal["ram"]
    base_ratio: int = Field(default=50, gt=0)
    ratios: list[int] = Field(
        default=[2, 4, 8, 16, 32], min_length=1, validation_alias=AliasChoices("reductions", "ratios")
    )
    window: int = Field(default=1000, gt=0)
    temperature: float = Field(default=0.1, gt=0)
    contrastive: bool = True

    def _slot_ratios(self) -> list[int]:
        return [self.base_ratio]  # the others apply to prompts
