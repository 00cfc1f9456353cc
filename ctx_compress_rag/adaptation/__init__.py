"""Adapting a decoder to a few demonstrations in one forward pass (RAG-GD), and its baselines."""

from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.baselines import BaseAdapter, FewShot, PredictedUpdate, PromptTuning, TestTimeSGD
from ctx_compress_rag.adaptation.decoder import (
    Adaptation,
    Adapted,
    AdaptiveDecoder,
    generate_together,
    text_bundle,
)
from ctx_compress_rag.adaptation.demonstrations import Demonstration

__all__ = [
    "Adaptation",
    "Adapted",
    "Adapter",
    "AdaptiveDecoder",
    "BaseAdapter",
    "Demonstration",
    "FewShot",
    "PredictedUpdate",
    "PromptTuning",
    "TestTimeSGD",
    "generate_together",
    "text_bundle",
]
