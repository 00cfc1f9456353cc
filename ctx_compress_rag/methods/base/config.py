"""The base classes of methods' settings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pydantic import Field

from ctx_compress_rag.errors import RatioError
from ctx_compress_rag.soft_context import merge_factor
from ctx_compress_rag.strict import LARGEST, Size, Strict

if TYPE_CHECKING:  # they import torch
    from ctx_compress_rag.methods.base.compressor import Compressor
    from ctx_compress_rag.methods.base.reader import Reader
    from ctx_compress_rag.models.backbone import Backbone


class TuneConfig(Strict):
    """How a copy of the decoder's weights is trained.

    `lora` adds low-rank adapters to the decoder's weights, which stay shared in memory (defaults from Simple Context
    Compression, table 6). `full`, for small decoders, trains a copy of the weights. The input embeddings, and a head
    that is tied to them, are not trained and stay shared. `frozen` trains nothing. Only `lora` uses the other fields,
    which are those of peft's LoraConfig (`rank` is its `r`).
    """

    mode: Literal["lora", "full", "frozen"] = "lora"
    rank: Size = 16
    alpha: int = Field(default=16, gt=0)
    target_modules: Literal["all-linear"] | list[str] = "all-linear"


def lora_config(tune: TuneConfig) -> Any:
    """Return the peft configuration for `tune`."""
    from peft import LoraConfig

    return LoraConfig(r=tune.rank, lora_alpha=tune.alpha, target_modules=tune.target_modules, task_type="CAUSAL_LM")


class WrapConfig(Strict):
    """How many learned vectors are put around slots.

    Attributes:
        before: the number of vectors before the slots.
        after: the number of vectors after the slots.
        every: vectors are put around each run of `every` slots; None puts them around all slots of a passage together.
    """

    before: int = Field(default=0, ge=0, le=LARGEST)
    after: int = Field(default=0, ge=0, le=LARGEST)
    every: int | None = Field(default=None, gt=0)

    def __bool__(self) -> bool:
        """Whether any vectors are put around slots."""
        return self.before + self.after > 0

    def positions(self, slots: int) -> int:
        """Return the number of decoder positions that `slots` slots take together with the vectors around them."""
        runs = 1 if self.every is None else -(-slots // self.every)
        return slots + runs * (self.before + self.after)


class MethodConfig(Strict):
    """The base class of methods' settings. A subclass with a literal `name`, which selects it, is a method."""

    methods: ClassVar[dict[str, type["MethodConfig"]]] = {}
    """The settings' class of each method, by the method's name."""
    paper: ClassVar[str] = ""
    """The title of the method's paper."""

    name: str

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.methods.update(dict.fromkeys(get_args(cls.model_fields["name"].annotation), cls))

    def compressor(self, backbone: "Backbone") -> "Compressor":
        """Make the untrained compressor for a decoder."""
        raise NotImplementedError

    def reader(self, backbone: "Backbone", compressor: Any) -> "Reader":
        """Make the untrained reader for a decoder and the compressor."""
        raise NotImplementedError

    def check_ratios(self, base_ratio: int, ratios: Sequence[int]) -> None:
        """Raise RatioError for the first of `ratios` that the method cannot make from slots stored at `base_ratio`."""
        for ratio in ratios:
            merge_factor(ratio, base_ratio)


class OneRatioConfig(MethodConfig):
    """The settings of a method that is trained for one ratio.

    Attributes:
        ratio: source tokens per slot.
    """

    ratio: int = Field(gt=0)

    def check_ratios(self, base_ratio: int, ratios: Sequence[int]) -> None:
        """Raise a RatioError if `base_ratio` or one of `ratios` is not this ratio."""
        for ratio in (base_ratio, *ratios):
            if ratio != self.ratio:
                raise RatioError(
                    f"ratio {ratio}: this compressor was trained for {self.ratio} only: leave out the ratio"
                )
