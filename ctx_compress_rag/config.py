"""The configuration of a bundle. Unknown keys and impossible values are refused by name."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from ctx_compress_rag.errors import ConfigError

T = TypeVar("T")
_WHOLE = TypeAdapter(int)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TuneConfig(_Strict):
    """How a copy of the decoder's weights is trained.

    `lora` adds low-rank adapters to weights shared in memory (paper 001, table 6 for the defaults);
    `full` trains a copy of all weights, for small decoders, but for the input embeddings, which all share, and
    with them the head of a decoder that ties it to them; `frozen` trains nothing.
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
    """ComprExIT (paper 002): explicit transmission from frozen hidden states to slots.

    Two switches are the paper's ablations (table 3): `layers: last` leaves out layer aggregation,
    `allocation: window_attention` coordinated allocation.

    `normalise_states` brings each hidden state to a root mean square of 1 first. The paper does not say
    whether it does. States grow from layer to layer and differ by two orders of magnitude between decoders
    and within one (the first token's); the scores of eq. 5 go with their square.

    `gate_dim`, `transport_dim`, `segment_tokens` and `iterations` are the paper's (table 7). `slot_dim`, the width
    of anchors and slots, is how we read its "projection hidden size" of 256 (section 4.1); with it the method adds
    about 1% of parameters to the paper's decoders, as the paper says. It gives neither `temperature` (tau of
    eq. 6), here the square root of 256 as in attention, nor `epsilon`, the weight of the entropy in eq. 11.
    """

    name: Literal["comprexit"] = "comprexit"
    layers: Literal["all", "last"] = "all"
    allocation: Literal["transport", "window_attention"] = "transport"
    normalise_states: bool = True
    gate_dim: int = Field(default=256, gt=0)
    slot_dim: int = Field(default=256, gt=0)
    transport_dim: int = Field(default=256, gt=0)
    temperature: float = Field(default=16.0, gt=0)
    segment_tokens: int = Field(default=128, gt=0)
    # Slots are to be anchored to their own field and still reach beyond it (figure 7b). Untrained, on the demo
    # decoder's states at 4x, a slot takes 35% of its mass from its field at 0.1, 59% at 0.05 and 72% at 0.02; there
    # 30 iterations leave 2% of the mass where it does not belong, at 0.05 less than 0.1%.
    epsilon: float = Field(default=0.05, gt=0)
    iterations: int = Field(default=30, gt=0)


class SentenceUnits(_Strict):
    """What becomes a vector of a sentence encoder (paper 000, sections 3.1 and 4.1).

    Attributes:
        encoder: a sentence-transformers model: a hub id, a folder, or "minilm" for the packaged one.
        encoder_revision: a hub revision.
        encoder_dim: the width of its vectors; told here so that reading stored slots needs no encoder.
        unit: what a slot stands for: a "sentence"; a "passage", which is xRAG; or as many neighbouring
            sentences, or as much of one, as fit into `ratio` "tokens". Ratios are nominal for the first two.
        language: ISO 639-1 code for the sentence splitter.
    """

    encoder: str = Field(default="sentence-transformers/all-MiniLM-L6-v2", min_length=1)
    encoder_revision: str | None = None
    encoder_dim: int = Field(default=384, gt=0)
    unit: Literal["sentence", "passage", "tokens"] = "sentence"
    language: str = "en"


class SentenceSlotsConfig(SentenceUnits):
    """Sentence vectors as slots (paper 000, sections 3.1-3.2); xRAG with one slot for each passage.

    The decoder is frozen, as xRAG's: only the projector is trained.
    """

    name: Literal["sentence_slots"] = "sentence_slots"
    decoder: TuneConfig = TuneConfig(mode="frozen")


class SelectiveLoraConfig(_Strict):
    """LoRA at slot positions only, beside every linear layer (paper 000, section 3.3 and table 5)."""

    rank: int = Field(default=128, gt=0)
    alpha: int = Field(default=32, gt=0)
    dropout: float = Field(default=0.05, ge=0, lt=1)


class ArcAlignerConfig(SentenceUnits):
    """ArcAligner (paper 000, tables 5 and 6): sentence slots read with selective LoRA and recursive gates.

    Attributes:
        lora: None is the paper's ablation without LoRA.
        loops: most passes after the mandatory one (T of algorithm 1); 0 switches the gates off: stages I
            and II, and the ablation without recursion. The tables' "max loops 3" is taken for T; appendix E
            counts the mandatory pass too, by which it would be 2.
        gated_layers: which of the decoder's layers have gates, from 0.
        gate: "open" is the ablation without gate: every slot takes all loops.
        gate_width: width of the gates' inner layer; the paper names none.
    """

    name: Literal["arcaligner"] = "arcaligner"
    lora: SelectiveLoraConfig | None = SelectiveLoraConfig()
    loops: int = Field(default=3, ge=0)
    gated_layers: Literal["all"] | list[int] = "all"
    gate: Literal["learned", "open"] = "learned"
    gate_width: int = Field(default=128, gt=0)


class RamConfig(_Strict):
    """RAM (paper 004): close reading of the segments a question needs, skimming of the rest.

    The paper trains encoder and decoder fully. `close_reading: false` skims every segment; `skimming`
    pools a skimmed segment as the question asks, by its plain "average", or drops it ("none"): the
    ablations of section 4.5.
    """

    name: Literal["ram"] = "ram"
    segment_tokens: int = Field(default=50, gt=0)
    encoder: TuneConfig = TuneConfig(mode="full")
    decoder: TuneConfig = TuneConfig(mode="full")
    close_reading: bool = True
    skimming: Literal["query", "average", "none"] = "query"

    @model_validator(mode="after")
    def _something_is_read(self) -> RamConfig:
        if not self.close_reading and self.skimming == "none":
            raise ValueError("close_reading: false and skimming: none leave nothing to read: switch off one of them")
        return self


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
        if isinstance(self.method, RamConfig):
            self._ratios_fit_segments(self.method)
        else:
            for ratio in self.ratios:
                if ratio < self.base_ratio or ratio % self.base_ratio:
                    raise ValueError(f"ratio {ratio} is no multiple of base_ratio {self.base_ratio}")
        if self.max_tokens % self.base_ratio:
            raise ValueError(f"max_tokens {self.max_tokens} is no multiple of base_ratio {self.base_ratio}")
        return self

    def _ratios_fit_segments(self, ram: RamConfig) -> None:
        """RAM stores a vector for each segment; its ratios are how much shorter a whole prompt's context becomes."""
        if self.base_ratio != ram.segment_tokens:
            raise ValueError(f"base_ratio {self.base_ratio} must be ram's segment_tokens, {ram.segment_tokens}")
        if min(self.ratios) < 2:
            raise ValueError(f"ratio {min(self.ratios)} makes nothing shorter: ram's ratios begin at 2")


def checked(name: str, value: object, rule: TypeAdapter[T]) -> T:
    """An argument by a rule of pydantic's, which takes 16, 16.0 and "16" for one number.

    Raises:
        ConfigError: it breaks the rule; the message begins with name and value.
    """
    try:
        return rule.validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{name}={repr(value)[:80]}: {said}") from None


def whole(name: str, value: object) -> int:
    """A whole number given as an argument.

    Raises:
        ConfigError: it is none.
    """
    return checked(name, value, _WHOLE)


def explain(error: ValidationError) -> str:
    """One line per fault: where, what, and the value given."""
    return "; ".join(
        f"{'.'.join(str(p) for p in e['loc']) or 'config'}: {e['msg']} (got {str(e['input'])[:80]!r})"
        for e in error.errors()
    )
