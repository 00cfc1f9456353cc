"""What methods' configurations are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from ctx_compress_rag.ratios import merge_factor
from ctx_compress_rag.settings import Strict


class TuneConfig(Strict):
    """How a copy of the decoder's weights is trained.

    `lora` adds low-rank adapters to weights shared in memory (Simple Context Compression, table 6 for the defaults);
    `full` trains a copy of all weights, for small decoders, except for the input embeddings, which all share, and
    with them the head of a decoder that ties it to them; `frozen` trains nothing.
    """

    mode: Literal["lora", "full", "frozen"] = "lora"
    rank: int = Field(default=16, gt=0)
    alpha: int = Field(default=16, gt=0)
    target_modules: str | list[str] = "all-linear"


def lora_config(tune: TuneConfig) -> Any:
    """The peft configuration for `tune`."""
    from peft import LoraConfig

    return LoraConfig(
        r=tune.rank,
        lora_alpha=tune.alpha,
        target_modules=tune.target_modules,
        task_type="CAUSAL_LM",
    )


class MethodConfig(Strict):
    """What every method's configuration has: a literal `name`, by which its class is found."""

    name: str

    def check_ratios(self, base_ratio: int, ratios: Sequence[int]) -> None:
        """Refuse ratios that the method cannot serve from what is stored at `base_ratio`.

        Raises:
            ValueError: naming the first of them; a RatioError where nothing else is wrong.
        """
        for ratio in ratios:
            merge_factor(ratio, base_ratio)
