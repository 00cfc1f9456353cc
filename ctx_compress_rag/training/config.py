"""What recipes hold. YAML, checked here, unknown keys refused by name."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from ctx_compress_rag.data.config import MixData, PartData, ProbeConfig, SourceConfig, TextData
from ctx_compress_rag.gguf import GgufDecoder
from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.methods.registry import AnyMethodConfig
from ctx_compress_rag.settings import Strict
from ctx_compress_rag.text.prompts import PARAPHRASES, TEMPLATES


class WorldData(Strict):
    """Examples of the invented world instead of files; see `data.world.examples` for the numbers."""

    split: Literal["train", "dev", "test"] = "train"
    seed: int = 0
    examples: int = Field(gt=0)
    passages: list[int] = Field(default=[1, 2, 3, 4, 4, 4], min_length=1)
    named: float | None = Field(default=None, ge=0, le=1)
    alike: float = Field(default=0.0, ge=0, le=1)


Guard: TypeAlias = Literal["refuse", "leave out"] | None


class DataConfig(Strict):
    """Where examples come from: files (of questions, or plain texts), or the invented world's parts, in order.

    Attributes:
        leave_out_held_out: for bundles that are scored with XQuAD and the other sets of `data.held_out`: train without
            the examples of `files` that share a question or passage with those, or with `held_out`, and refuse texts
            that do.
        refuse_held_out: refuse such examples, too.
        most_words: leave out the examples of `files` with a passage of more words.
        part: read only these of the files' examples.
    """

    files: list[Path] = []
    texts: list[TextData] = []
    mix: MixData | None = None
    leave_out_held_out: bool = False
    refuse_held_out: bool = False
    most_words: int | None = Field(default=None, gt=0)
    part: PartData | None = None
    world: list[WorldData] = []
    max_turns: int = Field(default=1, gt=0)
    held_out: list[Path] = []
    max_context_tokens: int = Field(default=1024, gt=0)
    max_answer_tokens: int = Field(default=256, gt=0)
    templates: list[str] = Field(default=list(TEMPLATES), min_length=1)

    @property
    def guard(self) -> Guard:
        """What to do with data that English bundles are scored with."""
        return "refuse" if self.refuse_held_out else "leave out" if self.leave_out_held_out else None

    @field_validator("world", mode="before")
    @classmethod
    def _parts(cls, world: Any) -> Any:
        return [world] if isinstance(world, dict) else world

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if bool(self.files or self.texts) == bool(self.world):
            raise ValueError("give either files or world (texts count as files)")
        for key in ("mix", "most_words", "part"):
            if getattr(self, key) is not None and not self.files:
                raise ValueError(f"{key} is for files of questions")
        for template in self.templates:
            if "{question}" not in template or "{context}" not in template:
                raise ValueError(f"template lacks {{context}} or {{question}}: {template!r}")
        return self


class OptimConfig(Strict):
    """Optimisation; the defaults are Simple Context Compression, table 6.

    After the warmup the learning rate falls from `learning_rate` to `final_learning_rate` by `schedule`.
    Where `muon_learning_rate` is given, Muon trains the matrices at that rate and AdamW the rest: decoders as
    small as the demo's learn to answer in a fraction of the steps.
    `compile` is for batches that all have one shape: the whole model; or its "layers", each the same code, for batches
    of any shape;
    `workers` are processes that make batches ahead; `bf16` is left out on a CPU without bfloat16 instructions.
    `checkpoint_layers` keeps of each decoder layer its input alone, and runs the layer again in the backward pass:
    memory for time.
    `shard` shares weights out to all processes of a torchrun (`training.sharding`): "frozen" those of decoder layers
    that are not trained, where a bundle is trained; "all" these and what is trained, with gradients and optimiser
    states, in every stage. `shard_frozen: true` is its earlier name.
    """

    steps: int = Field(default=48_000, gt=0)
    batch_size: int = Field(default=32, gt=0)
    micro_batch_size: int | None = Field(default=None, gt=0)
    learning_rate: float = Field(default=2e-4, gt=0)
    final_learning_rate: float = Field(default=2e-5, ge=0)
    muon_learning_rate: float | None = Field(default=None, gt=0)
    schedule: Literal["cosine", "linear"] = "cosine"
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    bf16: bool = False
    compile: bool | Literal["layers"] = False
    checkpoint_layers: bool = False
    shard: Literal["frozen", "all"] | None = None
    workers: int = Field(default=0, ge=0)
    save_every: int = Field(default=500, gt=0)
    log_every: int = Field(default=20, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _earlier_name(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "shard_frozen" not in values:
            return values
        warnings.warn("optim.shard_frozen is now optim.shard: frozen", DeprecationWarning, stacklevel=2)
        values = dict(values)
        return {"shard": "frozen"} | values if values.pop("shard_frozen") else values

    @model_validator(mode="after")
    def _shares_layers(self) -> OptimConfig:
        if self.shard and self.compile is True:
            raise ValueError("shard gathers weights layer by layer: take compile: layers, not compile: true")
        if self.shard == "all" and self.muon_learning_rate is not None:
            raise ValueError("shard: all is for AdamW, and Muon needs whole matrices: leave muon_learning_rate out")
        return self

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> OptimConfig:
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of micro_batch_size {self.micro_batch_size}")
        return self

    @model_validator(mode="after")
    def _falls(self) -> OptimConfig:
        if self.schedule == "linear" and self.final_learning_rate >= self.learning_rate:
            raise ValueError(f"final_learning_rate {self.final_learning_rate} is not below {self.learning_rate}")
        return self

    @property
    def items(self) -> int:
        """How many items of data all steps take together."""
        return self.steps * self.batch_size


class ScratchDecoder(Strict):
    """A decoder made from scratch: a transformers configuration and a tokenizer of its own."""

    config: dict[str, Any]
    vocab_size: int = Field(ge=262)


class BaseRecipe(Strict):
    """What every recipe has: a literal `stage`, by which its class is found, where it writes, and optimisation."""

    stage: str
    output: Path
    seed: int = 0
    optim: OptimConfig = OptimConfig()


class Recipe(BaseRecipe):
    """What every stage of training on examples has."""

    asks: ClassVar[bool] = True
    """Whether the stage needs questions."""
    repeats_texts: ClassVar[bool] = False
    """Whether texts without questions may stand beside them."""

    data: DataConfig
    probe: ProbeConfig | None = None

    @model_validator(mode="after")
    def _texts_ask_nothing(self) -> Recipe:
        if self.data.texts and self.asks and not self.repeats_texts:
            raise ValueError(f"stage {self.stage} needs questions, and texts have none: use files")
        return self


class DecoderRecipe(Recipe):
    """Train a decoder, not a bundle.

    Attributes:
        scratch: the decoder made from scratch; or
        decoder: a folder, hub id or GGUF file to continue from, at
        revision: of the hub.
    """

    scratch: ScratchDecoder | None = None
    decoder: str | GgufDecoder | None = None
    revision: str | None = None

    @model_validator(mode="after")
    def _shares_all(self) -> DecoderRecipe:
        if self.optim.shard == "frozen":
            raise ValueError(f"shard: frozen is for stages that train a bundle: for stage {self.stage} take shard: all")
        return self


class PretrainRecipe(DecoderRecipe):
    """Language modelling on packed text: windows without padding, cut from each text at a new place every time.

    Attributes:
        minilm: in place of `scratch` and `decoder`, MiniLM's weights turned into a decoder with this many positions
            (see `training.minilm_decoder`).
        window: tokens of a sequence.
    """

    asks = False
    stage: Literal["pretrain"]
    minilm: int | None = Field(default=None, gt=0)
    window: int = Field(default=1024, gt=1)

    @model_validator(mode="after")
    def _one_decoder(self) -> PretrainRecipe:
        if sum(start is not None for start in (self.scratch, self.decoder, self.minilm)) != 1:
            raise ValueError("give one of scratch, decoder (a folder, hub id or GGUF file) and minilm")
        if not self.data.texts or self.data.files:
            raise ValueError("pretraining reads data.texts, and no files of questions")
        if self.probe:
            raise ValueError("a decoder that is only pretrained answers no questions: leave out probe")
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


class PackingConfig(Strict):
    """A set of rows of one length that sequences are packed into (`training.packing`).

    A step takes `optim.batch_size` such sets, one at a time.

    Attributes:
        rows: of prompts.
        passage_rows: of passages to encode; a teacher has none.
        length: tokens of a row; longer passages and prompts are left out.
        examples: of the data, that a set takes.
    """

    rows: int = Field(default=5, gt=0)
    passage_rows: int = Field(default=7, gt=0)
    length: int = Field(default=384, gt=0)
    examples: int = Field(default=8, gt=0)


def _check_packed(optim: OptimConfig) -> None:
    if optim.micro_batch_size not in (None, 1):
        raise ValueError(
            f"micro_batch_size {optim.micro_batch_size}: packed rows are a micro-batch as they are; leave it out, and "
            "choose packing.rows"
        )


class TeacherRecipe(DecoderRecipe):
    """Fine-tune (or train from scratch) the decoder on question answering with full text.

    `decoder` may be the folder of a LoRA teacher that an earlier stage made: its adapter, as it is, is trained on.

    Attributes:
        packing: pack prompts into rows; what has no room in its batch is left out. For `tune.mode: lora`.
    """

    stage: Literal["teacher"]
    tune: TuneConfig = TuneConfig()
    context_loss_weight: float = Field(default=0.0, ge=0)
    pointing: PointingConfig | None = None
    packing: PackingConfig | None = None

    @model_validator(mode="after")
    def _packing_trains_answers(self) -> TeacherRecipe:
        if self.packing and (self.tune.mode != "lora" or self.context_loss_weight):
            raise ValueError("packing is for tune.mode: lora and answers alone: leave out context_loss_weight")
        if self.packing:
            _check_packed(self.optim)
        return self

    @model_validator(mode="after")
    def _pointing_needs_subjects(self) -> TeacherRecipe:
        if self.pointing and (self.data.files or self.tune.mode != "full"):
            raise ValueError("pointing needs data.world, which says what a question is about, and tune.mode: full")
        return self

    @model_validator(mode="after")
    def _one_decoder(self) -> TeacherRecipe:
        if (self.decoder is None) == (self.scratch is None):
            raise ValueError("give either decoder (a folder, hub id or GGUF file) or scratch")
        if self.scratch and self.tune.mode != "full":
            raise ValueError("a decoder from scratch needs tune.mode: full")
        return self


class RatioStep(Strict):
    """From `step` on, train these ratios: all of them, or `sample` drawn anew for each step, or for each example.

    One for each example is the ablation of "Simple Context Compression" (table 3). RAM draws for each question anyway.
    """

    step: int = Field(ge=0)
    ratios: list[int] = Field(min_length=1)
    sample: int | None = Field(default=None, gt=0)
    each: Literal["step", "example"] = "step"


class CompressionRecipe(Recipe):
    """Train a compressor and its reader: what every such stage has.

    Starts from untrained weights for `decoder`, or from the `bundle` that an earlier stage made. A
    `method` given beside a bundle replaces that bundle's settings, whose weights it must fit.

    `fit_passages` fits an untrained reader first, by least squares on so many of the data's passages: a slot
    for one token is to be read as that token's embedding. It is ours, for readers with a map of two layers before
    a frozen decoder, which reads nothing that does not look like its embeddings.

    `copy_decoder: false` makes the bundle name a decoder's folder, where `decoder` is one, in place of holding a copy.
    `reader_from_teacher` starts the reader's LoRA as the teacher's, which reads text already: ours, too.
    `int8` saves the bundle's matrices in 8 bits; `sources`, `decoder_licence` and `limits` go into its model card.

    Every step trains all of its ratios. A curriculum is ours: decoders as small as the demo's do not
    learn to read slots when they start at coarse ratios.
    """

    recites: ClassVar[bool] = False
    """Whether it takes passages alone, each once, and leaves the questions out."""

    name: str
    reads: str = "general text"
    bundle: Path | None = None
    decoder: str | GgufDecoder | None = None
    copy_decoder: bool = True
    revision: str | None = None
    teacher: Path | None = None
    method: AnyMethodConfig | None = None
    base_ratio: int = Field(default=4, gt=0)
    ratios: list[int] = [4, 8, 16, 32, 64, 128]
    window: int = Field(default=1024, gt=0)
    curriculum: list[RatioStep] = []
    fit_passages: int = Field(default=0, ge=0)
    reader_from_teacher: bool = False
    int8: bool = False
    sources: list[SourceConfig] = []
    decoder_licence: str | None = None
    limits: list[str] = []

    @model_validator(mode="after")
    def _one_start(self) -> CompressionRecipe:
        if (self.bundle is None) == (self.decoder is None):
            raise ValueError("give either decoder (a folder, hub id or GGUF file) or bundle (made by an earlier stage)")
        if self.decoder and self.method is None:
            raise ValueError("a new bundle needs a method")
        if self.bundle and self.fit_passages:
            raise ValueError("fit_passages is for an untrained reader, and a bundle's is trained: leave it out")
        if self.reader_from_teacher and self.teacher is None:
            raise ValueError("reader_from_teacher needs a teacher, for an untrained reader to start from")
        if self.bundle and (self.revision or self.teacher):
            raise ValueError("revision and teacher are the bundle's own: leave them out")
        return self

    @model_validator(mode="after")
    def _ratios_fit(self) -> CompressionRecipe:
        if self.method is None:  # a bundle's own, which is not there before an earlier stage has run
            return self
        self.method.check_ratios(self.base_ratio, [*self.ratios, *(r for part in self.curriculum for r in part.ratios)])
        if self.window % self.base_ratio:
            raise ValueError(f"window {self.window} is no multiple of base_ratio {self.base_ratio}")
        return self

    @model_validator(mode="after")
    def _the_same_passes_in_all_processes(self) -> CompressionRecipe:
        if self.optim.shard and any(part.each == "example" for part in self.curriculum):
            raise ValueError(
                "shard gathers weights for a pass that all processes make, and with `each: example` one of them may "
                "draw no example for a ratio: leave one of the two out"
            )
        return self

    def curriculum_at(self, step: int) -> RatioStep:
        """The part of the curriculum that an optimiser step is in."""
        current = RatioStep(step=0, ratios=self.ratios)
        for change in sorted(self.curriculum, key=lambda c: c.step):
            if change.step <= step:
                current = change
        return current

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
    """Answers and repeated passages read from slots, in packed rows; see `training.objectives.packed`.

    `data.files` hold the questions; their passages and those of `data.texts` are repeated. Each sequence draws a
    ratio of the step's, in which one that stands twice is drawn twice as often.

    Attributes:
        packing: the rows.
        repeat: how many of a batch's sequences repeat a passage, as training proceeds.
    """

    repeats_texts = True
    stage: Literal["repeat_and_answer"]
    window: int = Field(default=384, gt=0)
    packing: PackingConfig = PackingConfig()
    repeat: list[RepeatStep] = [RepeatStep(step=0, share=0.5)]

    @model_validator(mode="after")
    def _trains_what_it_serves(self) -> RepeatAndAnswerRecipe:
        if not self.data.files and not self.data.world:
            raise ValueError("stage repeat_and_answer needs questions: give data.files")
        _check_packed(self.optim)
        if self.window != self.packing.length:
            raise ValueError(f"window {self.window} must be packing.length, {self.packing.length}")
        return self

    def repeat_share_at(self, step: int) -> float:
        """The share of repeated passages at an optimiser step."""
        return max((r for r in self.repeat if r.step <= step), key=lambda r: r.step, default=self.repeat[0]).share


class DistillationRecipe(CompressionRecipe):
    """Distillation from the full-text teacher (Simple Context Compression), summed over ratios (eq. 6)."""

    stage: Literal["distillation"]
    reconstruction_weight: float = Field(default=0.0, ge=0)
    repeat_per_batch: int = Field(default=8, gt=0)


class NextTokenRecipe(CompressionRecipe):
    """The likelihood of the text that follows a compressed beginning (ComprExIT, section 3.3).

    `data.max_context_tokens` are compressed and `data.max_answer_tokens` predicted; questions are not used.
    """

    asks = False
    stage: Literal["next_token"]


class ReconstructionRecipe(CompressionRecipe):
    """The likelihood of passages reconstructed from their slots (ArcAligner, stage I, eq. 10).

    Each distinct passage of the data is a row of its own; questions are left out. A passage is cut to
    `data.max_context_tokens`, which bounds the answer, too.

    Attributes:
        paraphrases: prompts with a {context} for the slots, one drawn for each passage (table 7).
    """

    asks = False
    recites = True
    stage: Literal["reconstruction"]
    paraphrases: list[str] = Field(default=list(PARAPHRASES), min_length=1)

    @model_validator(mode="after")
    def _slots_have_a_place(self) -> ReconstructionRecipe:
        for template in self.paraphrases:
            if template.count("{context}") != 1:
                raise ValueError(f"a paraphrase needs one {{context}}: {template!r}")
        return self


class AnswerRecipe(CompressionRecipe):
    """The likelihood of answers read from slots (fine-tuning in ArcAligner and ComprExIT).

    `self_distillation` is the weight of KL(decoder with text || decoder with slots) on the same tokens (xRAG).
    """

    stage: Literal["answer"]
    self_distillation: float = Field(default=0.0, ge=0)


class RamRecipe(CompressionRecipe):
    """Answers read from kept and skimmed segments, and which to keep (Read As Human, eq. 7-9).

    One training for all ratios: each question draws one of the step's.

    Attributes:
        base_ratio: the method's `segment_tokens`.
        ratios: the paper's alpha, how many times shorter a prompt's context becomes.
        temperature: tau of eq. 8.
        contrastive: false is the paper's ablation without contrastive loss.
    """

    stage: Literal["ram"]
    base_ratio: int = Field(default=50, gt=0)
    ratios: list[int] = [2, 4, 8, 16, 32]
    window: int = Field(default=1000, gt=0)
    temperature: float = Field(default=0.1, gt=0)
    contrastive: bool = True
