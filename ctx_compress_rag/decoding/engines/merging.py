"""Merge a reader's LoRA into a second copy of the weights that the LoRA changes."""

import threading
from typing import Any
from weakref import WeakKeyDictionary

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.models.layers import merged_copy
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
            made[side] = merged_copy(bundle.backbone.model, bundle.adapter_shares(side))
        return made[side]
