"""Merge a reader's LoRA into a second copy of the weights that the LoRA changes."""

import copy
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.models.backbone import lora_delta
from ctx_compress_rag.prompt import Side

_MERGED: WeakKeyDictionary[PlainDecoder, dict[Side, Any]] = WeakKeyDictionary()
_MERGING = threading.Lock()


def merged_model(bundle: Bundle, side: Side = "reader") -> Any:
    """Return a bundle's model with the LoRA of one side merged; the first call makes it.

    The model shares all weights that the LoRA does not change. No adapter may be active.
    """
    with _MERGING:
        made = _MERGED.setdefault(bundle, {})
        if side not in made:
            made[side] = _merge(bundle.backbone.model, bundle.adapter_shares(side))
        return made[side]


@torch.no_grad()
def _merge(model: Any, shares: Mapping[str, float]) -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer

    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for name, layer in list(twin.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            lora: Any = layer
            merged = lora.get_base_layer()
            if (delta := lora_delta(lora, shares)) is not None:
                merged.weight = nn.Parameter(merged.weight + delta.to(merged.weight.dtype), requires_grad=False)
            parent, _, own = name.rpartition(".")
            setattr(twin.get_submodule(parent), own, merged)
    return twin
