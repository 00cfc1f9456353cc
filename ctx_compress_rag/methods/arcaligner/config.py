"""Settings of ArcAligner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ctx_compress_rag.methods.sentence_slots.config import SentenceUnits
from ctx_compress_rag.strict import Strict


class SelectiveLoraConfig(Strict):
    """LoRA at slot positions only, beside every linear layer (ArcAligner, section 3.3 and table 5)."""

    rank: int = Field(default=128, gt=0)
    alpha: int = Field(default=32, gt=0)
    dropout: float = Field(default=0.05, ge=0, lt=1)


class ArcAlignerConfig(SentenceUnits):
    """ArcAligner (tables 5 and 6): sentence slots read with selective LoRA and recursive gates.

    Attributes:
        lora: None is the paper's ablation without LoRA.
        loops: most passes after the mandatory one (T of algorithm 1); 0 switches the gates off, for stages I
            and II and the ablation without recursion. We read the tables' "max loops 3" as T: algorithm 1 defines
            the method, and its T counts passes after the mandatory one, as does section 3.4 ("up to T additional").
            Appendix E also counts the mandatory pass; T would then be 2.
        gated_layers: which of the decoder's layers have gates, counted from 0.
        gate: "open" is the ablation without gate: every slot takes all loops.
        gate_width: width of the gates' inner layer; the paper does not give it.
    """

    name: Literal["arcaligner"] = "arcaligner"
    lora: SelectiveLoraConfig | None = SelectiveLoraConfig()
    loops: int = Field(default=3, ge=0)
    gated_layers: Literal["all"] | list[int] = "all"
    gate: Literal["learned", "open"] = "learned"
    gate_width: int = Field(default=128, gt=0)
