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

_MERGED: WeakKeyDictionary[PlainDecoder, dict[bool, Any]] = WeakKeyDictionary()
_MERGING = threading.Lock()


def merged_model(bundle: Bundle, *, blended: bool = False) -> Any:
    """Return a bundle's model with its reader's LoRA, or its blend, merged; the first call makes it.

    The model shares all weights that the LoRA does not change. No adapter may be active.
    """
    with _MERGING:
        made = _MERGED.setdefault(bundle, {})
        if blended not in made:
            made[blended] = _merge(bundle.backbone.model, bundle.adapter_shares("blend" if blended else "reader"))
        return made[blended]


@torch.no_grad()
def _merge(model: Any, shares: Mapping[str, float]) -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer

    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for name, layer in list(twin.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            lora: Any = layer
            merged = lora.get_base_layer()
            added = [share * lora.get_delta_weight(name) for name, share in shares.items() if name in lora.lora_A]
            if added:
                merged.weight = nn.Parameter(merged.weight + sum(added), requires_grad=False)
            parent, _, own = name.rpartition(".")
            setattr(twin.get_submodule(parent), own, merged)
    return twin
