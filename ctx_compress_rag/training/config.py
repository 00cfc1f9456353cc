"""The settings in recipes, which are read from YAML and validated. An unknown key is an error that names the key."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from ctx_compress_rag.data.mixing import MixData
from ctx_compress_rag.strict import Strict
from ctx_compress_rag.text.templates import TEMPLATES

if TYPE_CHECKING:
    from ctx_compress_rag.training.engine.loop import TrainingJob


class TextData(Strict):
    """A file of plain text (.txt, .txt.xz), or a file of questions (.jsonl, .jsonl.gz) whose passages are used as text.

    Attributes:
        file: the file's path.
        words: the least words of a training example, which has whole lines. The last of a document may have fewer.
    """

    file: Path
    words: int = Field(default=256, gt=0)


class PartData(Strict):
    """A run of consecutive examples for one stage of a comparison. It may start where an earlier stage's part ended.

    Attributes:
        start: the number of examples to skip, after mixing. After the last example, counting continues with the first.
        examples: the number of examples to use.
        seed: the seed for the order and the mixing of examples, used in place of the recipe's seed.
    """

    start: int = Field(ge=0)
    examples: int = Field(gt=0)
    seed: int = 0


class SourceConfig(Strict):
    """A data set that a bundle or its decoder was trained on, with its license, as the model card lists it."""

    data: str
    license: str


class DataConfig(Strict):
    """The data that a recipe trains on: files of questions, or of plain text.

    Attributes:
        files, texts: JSONL files of questions (see `data.examples.read_jsonl`), and files of plain text.
        mix: how examples become prompts of several passages; None leaves the examples as they are, in random order.
        most_words: examples of `files` that have a passage with more words are left out; None sets no limit.
        part: the part of the examples to use; None uses all.
        max_turns: the most questions about the same passages in one example.
        held_out: files of questions to score with. Examples that share a question or passage are left out and counted.
        max_context_tokens, max_answer_tokens: lengths to which an example's passages (together) and an answer are cut.
        templates: prompt templates, of which one is drawn for each example.
    """

    files: list[Path] = []
    texts: list[TextData] = []
    mix: MixData | None = None
    most_words: int | None = Field(default=None, gt=0)
    part: PartData | None = None
    max_turns: int = Field(default=1, gt=0)
    held_out: list[Path] = []
    max_context_tokens: int = Field(default=1024, gt=0)
    max_answer_tokens: int = Field(default=256, gt=0)
    templates: list[str] = Field(default=list(TEMPLATES), min_length=1)

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if not (self.files or self.texts):
            raise ValueError("there is nothing to train on: give files or texts")
        for key in ("mix", "most_words", "part"):
            if getattr(self, key) is not None and not self.files:
                raise ValueError(f"{key} is for files of questions: give files, or leave it out")
        for template in self.templates:
            if "{question}" not in template or "{context}" not in template:
                raise ValueError(f"template lacks {{context}} or {{question}}: {template!r}")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Strict):
    """The settings of optimization. The defaults are those of Simple Context Compression, table 6.

    Attributes:
        steps: the number of steps.
        batch_size: examples in a step, of all processes together.
        micro_batch_size: examples that a process takes at once (None: its whole share); it does not change gradients.
        learning_rate, final_learning_rate: after the warm-up the rate falls from the first to the second by `schedule`.
        muon_learning_rate: the rate of Muon, which then trains the matrices, while AdamW trains the rest (None: all).
            Decoders of a few million weights then learn to answer in a fraction of the steps.
        warmup_ratio: the share of the steps in which the rate rises from zero.
        clip_norm: the largest norm of a step's gradients; larger ones are scaled down to it.
        average: the decay of an exponential moving average of the weights, which is saved in place of the last weights,
            as these are noisier. 0.99 averages about the last 100 steps. None saves the last weights.
        bf16: compute in bfloat16; ignored on a CPU without bfloat16 instructions.
        compile: compile the decoder layers, which share their code, for batches of any shape.
        checkpoint_layers: keep only each layer's input, and run the layer again backward: less memory, more time.
        save_every, log_every: the number of steps from one checkpoint, or row of the log, to the next.
    """

    steps: int = Field(default=48_000, gt=0)
    batch_size: int = Field(default=32, gt=0)
    micro_batch_size: int | None = Field(default=None, gt=0)
    learning_rate: float = Field(default=2e-4, gt=0)
    final_learning_rate: float = Field(default=2e-5, ge=0)
    muon_learning_rate: float | None = Field(default=None, gt=0)
    schedule: Literal["cosine", "linear"] = "cosine"
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    average: float | None = Field(default=None, gt=0, lt=1)
    bf16: bool = False
    compile: bool = False
    checkpoint_layers: bool = False
    save_every: int = Field(default=500, gt=0)
    log_every: int = Field(default=20, gt=0)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            )
        rate, final = self.learning_rate, self.final_learning_rate
        if final > rate or (self.schedule == "linear" and final == rate):
            raise ValueError(f"final_learning_rate {final} must be below learning_rate {rate}")
        return self

    @property
    def items(self) -> int:
        """Return the number of examples in all steps together."""
        return self.steps * self.batch_size


class PackingConfig(Strict):
    """The size of a packed batch: rows of one length that short sequences are packed into (`training.engine.packing`).

    A step takes `optim.batch_size` such batches, one at a time, whatever `optim.micro_batch_size` is.

    Attributes:
        rows: the number of rows of prompts.
        passage_rows: the number of rows of passages to encode; a teacher has none.
        length: tokens per row. Longer passages and prompts are left out.
        examples: the number of examples that a packed batch takes.
    """

    rows: int = Field(default=5, gt=0)
    passage_rows: int = Field(default=7, gt=0)
    length: int = Field(default=384, gt=0)
    examples: int = Field(default=8, gt=0)


class BaseRecipe(Strict):
    """The settings of every recipe: a literal `stage`, which selects its class, an output folder, and optimization."""

    stages: ClassVar[dict[str, type["BaseRecipe"]]] = {}
    """The class of each stage's recipes, by the stage's name."""

    stage: str
    output: Path
    seed: int = Field(default=0, ge=0, lt=2**32)
    optim: OptimConfig = OptimConfig()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.stages.update(dict.fromkeys(get_args(cls.model_fields["stage"].annotation), cls))

    def make_job(self) -> "TrainingJob":
        """Return what the recipe trains; each stage has its own."""
        raise NotImplementedError

    @field_validator("output", mode="before")
    @classmethod
    def _named(cls, output: Any) -> Any:
        if isinstance(output, str) and not output.strip():
            raise ValueError("it is empty: give a folder for what the recipe writes")
        return output


class Recipe(BaseRecipe):
    """The settings of every recipe that trains on examples."""

    asks: ClassVar[bool] = True
    """Whether the stage needs questions."""
    recites: ClassVar[bool] = False
    """Whether the stage trains on passages only, each once, and ignores the questions."""
    repeats_texts: ClassVar[bool] = False
    """Whether the stage takes texts besides its questions."""

    data: DataConfig

    @model_validator(mode="after")
    def _texts_ask_nothing(self) -> Self:
        if self.data.texts and self.asks and not self.repeats_texts:
            raise ValueError(f"stage {self.stage} needs questions, and texts have none: use files")
        return self
