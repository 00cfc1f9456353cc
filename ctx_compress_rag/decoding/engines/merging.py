"""Merge a reader's LoRA into a second copy of the weights that the LoRA changes."""

from __future__ import annotations

import copy
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.reader import Reader

_MERGED: WeakKeyDictionary[PlainDecoder, Any] = WeakKeyDictionary()
_MERGING = threading.Lock()


def check_mergeable(bundle: PlainDecoder) -> None:
    """Raise ConfigError unless the bundle's reader has LoRA, on weights that are not quantized."""
    reader = bundle.reader if isinstance(bundle, Bundle) else None
    if type(reader) is not Reader or reader.tune.mode != "lora" or bundle.backbone.quantized:
        raise ConfigError("merge=True: only a reader with LoRA on weights that are not quantized can be merged")


def merged_model(bundle: PlainDecoder) -> Any:
    """Return a bundle's model with its reader's LoRA merged; the first call makes it. Other weights are shared."""
    with _MERGING:
        if bundle not in _MERGED:
            _MERGED[bundle] = _merge(bundle.backbone.model, Reader.side)
        return _MERGED[bundle]


@torch.no_grad()
def _merge(model: Any, adapter: str) -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer

    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for name, layer in list(twin.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            lora: Any = layer
            merged = lora.get_base_layer()
            if adapter in lora.lora_A:
                merged.weight = nn.Parameter(merged.weight + lora.get_delta_weight(adapter), requires_grad=False)
            parent, _, own = name.rpartition(".")
            setattr(twin.get_submodule(parent), own, merged)
    return twin
