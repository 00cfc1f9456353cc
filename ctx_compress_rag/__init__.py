"""Soft context for RAG: compress passages once, keep them in Chroma, read them with a local decoder.

The names below, `ctx_compress_rag.errors` and the two frameworks' packages are public; everything else is private, and
may change in any version. Names are imported at first use, so that `import ctx_compress_rag` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctx_compress_rag.adaptation.adapt import Demonstration, adapt, with_adapter
    from ctx_compress_rag.adaptation.adapter import Adapter
    from ctx_compress_rag.adaptation.predicted import PredictedUpdate
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.bundle.exported import ExportedBundle
    from ctx_compress_rag.data.examples import read_jsonl, write_jsonl
    from ctx_compress_rag.decoding.decoder import Decoder
    from ctx_compress_rag.decoding.sampling import Generation, Sampling
    from ctx_compress_rag.evaluation.agreement import (
        agreement_advice,
        agreement_table,
        agreement_text,
        measure_agreement,
        worst_agreements,
    )
    from ctx_compress_rag.evaluation.harness import evaluate, score_table
    from ctx_compress_rag.evaluation.questions import Question, questions_of
    from ctx_compress_rag.indexing.build import update_index
    from ctx_compress_rag.indexing.demo import wikipedia_corpus
    from ctx_compress_rag.indexing.index import open_index
    from ctx_compress_rag.indexing.inputs import open_index_input
    from ctx_compress_rag.marking.mark import expand, mark_texts
    from ctx_compress_rag.published.importing import import_published
    from ctx_compress_rag.soft_context import SoftContext
    from ctx_compress_rag.store import Passage, SoftContextStore
    from ctx_compress_rag.store.marker import scope
    from ctx_compress_rag.text.answers import token_f1
    from ctx_compress_rag.training.run import run_recipe

__version__ = "0.1.0"

_PLACES = {
    "adaptation.adapt": "Demonstration adapt with_adapter",
    "adaptation.adapter": "Adapter",
    "adaptation.predicted": "PredictedUpdate",
    "bundle.bundle": "Bundle",
    "bundle.exported": "ExportedBundle",
    "data.examples": "read_jsonl write_jsonl",
    "decoding.decoder": "Decoder",
    "decoding.sampling": "Generation Sampling",
    "evaluation.agreement": "agreement_advice agreement_table agreement_text measure_agreement worst_agreements",
    "evaluation.harness": "evaluate score_table",
    "evaluation.questions": "Question questions_of",
    "indexing.build": "update_index",
    "indexing.demo": "wikipedia_corpus",
    "indexing.index": "open_index",
    "indexing.inputs": "open_index_input",
    "marking.mark": "expand mark_texts",
    "published.importing": "import_published",
    "soft_context": "SoftContext",
    "store": "Passage SoftContextStore",
    "store.marker": "scope",
    "text.answers": "token_f1",
    "training.run": "run_recipe",
}
_LAZY = {name: f"ctx_compress_rag.{module}" for module, names in _PLACES.items() for name in names.split()}

__all__ = [
    "Adapter", "Bundle", "Decoder", "Demonstration", "ExportedBundle", "Generation", "Passage", "PredictedUpdate",
    "Question", "Sampling", "SoftContext", "SoftContextStore", "__version__", "adapt", "agreement_advice",
    "agreement_table", "agreement_text", "evaluate", "expand", "import_published", "mark_texts", "measure_agreement",
    "open_index", "open_index_input", "questions_of", "read_jsonl", "run_recipe", "scope", "score_table", "token_f1",
    "update_index", "wikipedia_corpus", "with_adapter", "worst_agreements", "write_jsonl",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
