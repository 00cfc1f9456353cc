"""Settings of ArcAligner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ctx_compress_rag.methods.sentence_slots.config import SentenceUnits
from ctx_compress_rag.settings import Strict


class SelectiveLoraConfig(Strict):
    """LoRA at slot positions only, beside every linear layer (ArcAligner, section 3.3 and table 5)."""

    rank: int = Field(default=128, gt=0)
    alpha: int = Field(default=32, gt=0)
    dropout: float = Field(default=0.05, ge=0, lt=1)


class ArcAlignerConfig(SentenceUnits):
    """ArcAligner (tables 5 and 6): sentence slots read with selective LoRA and recursive gates.

    Attributes:
        lora: None is the paper's ablation without LoRA.
        loops: most passes after the mandatory one (T of algorithm 1); 0 switches the gates off: stages I
            and II, and the ablation without recursion. The tables' "max loops 3" is taken for T: algorithm 1 is the
            method, and its T counts passes after the mandatory one, as section 3.4 does ("up to T additional").
            Appendix E counts the mandatory pass too, by which it would be 2.
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
