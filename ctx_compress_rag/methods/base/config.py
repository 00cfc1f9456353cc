"""The base classes of methods' configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from ctx_compress_rag.errors import RatioError
from ctx_compress_rag.soft_context import merge_factor
from ctx_compress_rag.strict import Strict


class TuneConfig(Strict):
    """How a copy of the decoder's weights is trained.

    `lora` adds low-rank adapters to weights shared in memory (defaults from Simple Context Compression, table 6).
    `full`, for small decoders, trains a copy of all weights except the input embeddings, and the head if it is tied
    to them, which all copies share. `frozen` trains nothing.
    """

    mode: Literal["lora", "full", "frozen"] = "lora"
    rank: int = Field(default=16, gt=0)
    alpha: int = Field(default=16, gt=0)
    target_modules: Literal["all-linear"] | list[str] = "all-linear"


def lora_config(tune: TuneConfig) -> Any:
    """The peft configuration for `tune`."""
    from peft import LoraConfig

    return LoraConfig(
        r=tune.rank,
        lora_alpha=tune.alpha,
        target_modules=tune.target_modules,
        task_type="CAUSAL_LM",
    )


class WrapConfig(Strict):
    """How many vectors go around slots.

    Attributes:
        before: vectors before the slots.
        after: vectors after them.
        every: each run of so many slots is wrapped by itself; None wraps a passage's slots together.
    """

    before: int = Field(default=0, ge=0)
    after: int = Field(default=0, ge=0)
    every: int | None = Field(default=None, gt=0)

    def __bool__(self) -> bool:
        """Whether there are any vectors."""
        return self.before + self.after > 0

    def positions(self, slots: int) -> int:
        """Number of slots and of the vectors around them."""
        runs = 1 if self.every is None else -(-slots // self.every)
        return slots + runs * (self.before + self.after)


class MethodConfig(Strict):
    """Base of every method's configuration: it has a literal `name`, by which its class is found."""

    name: str

    def check_ratios(self, base_ratio: int, ratios: Sequence[int]) -> None:
        """Refuse ratios that the method cannot make from slots stored at `base_ratio`.

        Raises:
            ValueError: a ratio is impossible; the message names the first. A RatioError if only the ratio is wrong.
        """
        for ratio in ratios:
            merge_factor(ratio, base_ratio)


class OneRatioConfig(MethodConfig):
    """Settings of a method that was trained for one ratio.

    Attributes:
        ratio: source tokens per slot.
    """

    ratio: int = Field(gt=0)

    def check_ratios(self, base_ratio: int, ratios: Sequence[int]) -> None:
        """Raise a RatioError for any other ratio."""
        for ratio in (base_ratio, *ratios):
            if ratio != self.ratio:
                raise RatioError(
                    f"ratio {ratio}: this compressor was trained for {self.ratio} only: leave out the ratio"
                )
