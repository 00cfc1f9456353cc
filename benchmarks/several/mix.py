"""The weighted mean of two bundles' weights, or of a bundle's reader and teacher."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.files import TEACHER
from ctx_compress_rag.methods.base.config import lora_config


def mix(start: Bundle, trained: Bundle, share: float) -> Bundle:
    """Move the weights that training changes from `start`'s towards `trained`'s, by `share` of the way, in place.

    Returns: `trained`, so mixed.
    """
    ways = [bundle.compressor.trained_parameters() + bundle.reader.trained_parameters() for bundle in (start, trained)]
    with torch.no_grad():
        for before, after in zip(*ways, strict=True):
            after.copy_(torch.lerp(before, after, share))
    return trained


def blend(bundle: Bundle, share: float) -> Bundle:
    """Let a bundle's reader change the decoder by `share` of what its own LoRA adds, and the rest of the teacher's.

    The reader's new LoRA has the sum of both ranks. Returns: the bundle, changed in place.
    """
    backbone, side = bundle.backbone, bundle.reader.side
    matrices: dict[str, list[torch.Tensor]] = {}
    rank = 0
    for name, weight in ((side, share), (TEACHER, 1 - share)):
        lora: Any = backbone.model.peft_config[name]
        rank += lora.r
        for key, matrix in backbone.adapter_state(name).items():
            scale = weight * lora.lora_alpha / lora.r if "lora_B" in key else 1.0
            matrices.setdefault(key, []).append(scale * matrix)
    for module in backbone.model.modules():
        if isinstance(module, BaseTunerLayer):
            module.delete_adapter(side)
    method = bundle.config.method.model_dump()
    method["decoder"] |= {"rank": rank, "alpha": rank}
    bundle.config = bundle.config.model_validate(bundle.config.model_dump() | {"method": method})
    bundle.reader.tune = bundle.reader.tune.model_copy(update={"rank": rank, "alpha": rank})
    backbone.add_adapter(side, lambda: lora_config(bundle.reader.tune))
    joined = {key: torch.cat(both, 1 if "lora_B" in key else 0) for key, both in matrices.items()}
    backbone.load_adapter_state(side, joined)
    return bundle
