"""The configuration of a bundle. Unknown keys and impossible values are refused by name."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TuneConfig(_Strict):
    """How a copy of the decoder's weights is trained.

    `lora` adds low-rank adapters to weights shared in memory (paper 001, table 6 for the defaults);
    `full` trains a copy of all weights, for small decoders; `frozen` trains nothing.
    """

    mode: Literal["lora", "full", "frozen"] = "lora"
    rank: int = Field(default=16, gt=0)
    alpha: int = Field(default=16, gt=0)
    target_modules: str | list[str] = "all-linear"


class MeanPoolingConfig(_Strict):
    """Mean pooling (paper 001, section 4.1).

    `embedding_skip` adds each token's embedding to its hidden state, scaled to the embeddings' size,
    before pooling. It is not in the paper (the default is off); small decoders learn to read slots
    sooner with it.
    """

    name: Literal["mean_pooling"] = "mean_pooling"
    encoder: TuneConfig = TuneConfig()
    decoder: TuneConfig = TuneConfig()
    linear: bool = True
    embedding_skip: bool = False


MethodConfig = MeanPoolingConfig
"""The methods' configurations. A second method makes this a union told apart by `name`."""


class BundleConfig(_Strict):
    """What is in a bundle's config.json.

    Attributes:
        format: version of the bundle format.
        name: the bundle's name.
        method: the compression method and its settings.
        decoder: hub id or path of the decoder; None when the bundle ships it in `decoder/`.
        revision: the decoder's revision on the hub.
        base_ratio: source tokens per slot in the store.
        ratios: the ratios it was trained for.
        max_tokens: the encoder's window; longer passages are compressed window by window.
        reads: one line on what text it is meant for.
    """

    format: Literal[1] = 1
    name: str = Field(min_length=1)
    method: MethodConfig
    decoder: str | None = None
    revision: str | None = None
    base_ratio: int = Field(gt=0)
    ratios: list[int] = Field(min_length=1)
    max_tokens: int = Field(gt=0)
    reads: str = "general text"

    @model_validator(mode="after")
    def _ratios_fit(self) -> BundleConfig:
        for ratio in self.ratios:
            if ratio < self.base_ratio or ratio % self.base_ratio:
                raise ValueError(f"ratio {ratio} is no multiple of base_ratio {self.base_ratio}")
        if self.max_tokens % self.base_ratio:
            raise ValueError(f"max_tokens {self.max_tokens} is no multiple of base_ratio {self.base_ratio}")
        return self


def explain(error: ValidationError) -> str:
    """One line per fault: where, what, and the value given."""
    return "; ".join(
        f"{'.'.join(str(p) for p in e['loc']) or 'config'}: {e['msg']} (got {str(e['input'])[:80]!r})"
        for e in error.errors()
    )
