"""What recipes hold. YAML, checked here, unknown keys refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from ctx_compress_rag.data.config import MixData, PartData, ProbeConfig, TextData
from ctx_compress_rag.settings import Strict
from ctx_compress_rag.text.prompts import TEMPLATES


class WorldData(Strict):
    """Examples of the invented world instead of files; see `data.world.world_examples` for the numbers."""

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
    `average` is the decay of an exponential moving average of the weights, which is what is saved and probed; 0.99 is
    about the last 100 steps'. A single step's weights are noisier, the more so the smaller the batches and the higher
    the learning rate.
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
    average: float | None = Field(default=None, gt=0, lt=1)
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
    def _fits_together(self) -> OptimConfig:
        if self.shard and self.compile is True:
            raise ValueError("shard gathers weights layer by layer: take compile: layers, not compile: true")
        if self.shard == "all" and self.muon_learning_rate is not None:
            raise ValueError("shard: all is for AdamW, and Muon needs whole matrices: leave muon_learning_rate out")
        if self.shard == "all" and self.average is not None:
            raise ValueError("average needs whole weights, which no process has with shard: all: leave one of them out")
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of micro_batch_size {self.micro_batch_size}")
        if self.schedule == "linear" and self.final_learning_rate >= self.learning_rate:
            raise ValueError(f"final_learning_rate {self.final_learning_rate} is not below {self.learning_rate}")
        return self

    @property
    def items(self) -> int:
        """How many items of data all steps take together."""
        return self.steps * self.batch_size


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


def check_packed(optim: OptimConfig) -> None:
    """Refuse micro-batches beside packed rows, which are one each."""
    if optim.micro_batch_size not in (None, 1):
        raise ValueError(
            f"micro_batch_size {optim.micro_batch_size}: packed rows are a micro-batch as they are; leave it out, and "
            "choose packing.rows"
        )


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
