"""Soft context for RAG: compress passages once, keep them in Chroma, read them with a local decoder.

Public names are imported on first use, so that `import ctx_compress_rag` does not import torch. Errors are in `errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.decoding.decoder import Decoder
    from ctx_compress_rag.soft_context import SoftContext
    from ctx_compress_rag.store import Passage, SoftContextStore

__version__ = "0.1.0"

__all__ = ["Bundle", "Decoder", "Passage", "SoftContext", "SoftContextStore", "__version__"]

_LAZY = {
    "Bundle": "ctx_compress_rag.bundle.bundle",
    "Passage": "ctx_compress_rag.store",
    "SoftContext": "ctx_compress_rag.soft_context",
    "SoftContextStore": "ctx_compress_rag.store",
    "Decoder": "ctx_compress_rag.decoding.decoder",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
