"""Adapting a decoder to a few demonstrations in one forward pass (RAG-GD), and its baselines.

Names are imported on first use: the frameworks' LLM classes stand on `adaptation.llm` alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctx_compress_rag.adaptation.adapter import Adapter
    from ctx_compress_rag.adaptation.baselines import BaseAdapter, PredictedUpdate, TestTimeSGD
    from ctx_compress_rag.adaptation.decoder import Adaptation, Adapted, AdaptiveDecoder, generate_together
    from ctx_compress_rag.adaptation.demonstrations import Demonstration

__all__ = [
    "Adaptation",
    "Adapted",
    "Adapter",
    "AdaptiveDecoder",
    "BaseAdapter",
    "Demonstration",
    "PredictedUpdate",
    "TestTimeSGD",
    "generate_together",
]

_MODULES = {
    "adapter": ("Adapter",),
    "baselines": ("BaseAdapter", "PredictedUpdate", "TestTimeSGD"),
    "decoder": ("Adaptation", "Adapted", "AdaptiveDecoder", "generate_together"),
    "demonstrations": ("Demonstration",),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
