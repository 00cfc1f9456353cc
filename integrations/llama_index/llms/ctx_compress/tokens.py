"""Count the tokens of prompts with markers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import TransformersDecoder
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import scope as in_scope


def marker_tokenizer(store: SoftContextStore, scope: str | None = None) -> Callable[[str], list[int]]:
    """The decoder's tokenizer with one id for each slot of a marker, for `Settings.tokenizer`.

    Without it, LlamaIndex counts a marker's letters, with another model's tokenizer, when it packs a prompt. Keep
    a passage's slots below the chunk size that is left for context (and that of a `CitationQueryEngine`):
    LlamaIndex cuts longer passages, and half a marker is only text.

    Args:
        store: where the soft contexts are.
        scope: tenant or user whose markers count as slots; by default that of
            `ctx_compress_rag.store.marker.scope`, or the store's.
    """
    decoder = TransformersDecoder(cast(Bundle, store.bundle), store)

    def tokenize(text: str) -> list[int]:
        with nullcontext() if scope is None else in_scope(scope):
            return decoder.token_ids(text)

    return tokenize
