"""The configuration of a bundle. Unknown keys and impossible values are refused by name."""

from __future__ import annotations

from typing import Annotated, Literal

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


class CompressionTokensConfig(_Strict):
    """Compression tokens (paper 001, section 5.1): one learned token, repeated once for each slot.

    `attention` is how they see each other and the text: "causal" as the decoder does, or
    "bidirectional" among compression tokens, causal over the text.
    """

    name: Literal["compression_tokens"] = "compression_tokens"
    attention: Literal["causal", "bidirectional"] = "bidirectional"
    encoder: TuneConfig = TuneConfig()
    decoder: TuneConfig = TuneConfig()


class ComprexitConfig(_Strict):
    """ComprExIT (paper 002): explicit transmission from frozen hidden states to slots."""

    name: Literal["comprexit"] = "comprexit"


class SentenceSlotsConfig(_Strict):
    """Sentence vectors as slots (paper 000, sections 3.1-3.2); xRAG with one slot for each passage."""

    name: Literal["sentence_slots"] = "sentence_slots"


class ArcAlignerConfig(_Strict):
    """ArcAligner (paper 000): sentence slots read with selective LoRA and recursive gates."""

    name: Literal["arcaligner"] = "arcaligner"


class RamConfig(_Strict):
    """RAM (paper 004): close reading of the segments a question needs, skimming of the rest."""

    name: Literal["ram"] = "ram"


MethodConfig = Annotated[
    MeanPoolingConfig | CompressionTokensConfig | ComprexitConfig | SentenceSlotsConfig | ArcAlignerConfig | RamConfig,
    Field(discriminator="name"),
]
"""The methods' configurations, told apart by `name`."""


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
