"""Counting prompts that hold markers."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.decoders.transformers import TransformersDecoder
from ctx_compress_rag.stores import SoftContextStore


def marker_tokenizer(store: SoftContextStore) -> Callable[[str], list[int]]:
    """The decoder's tokenizer with one id for each slot of a marker, for `Settings.tokenizer`.

    Without it LlamaIndex counts a marker's letters, with another model's tokenizer, when it packs a
    prompt. Keep a passage's slots below the chunk size that is left for context: LlamaIndex cuts what is
    longer, and half a marker is only text.
    """
    return TransformersDecoder(cast(Bundle, store.bundle), store).token_ids
