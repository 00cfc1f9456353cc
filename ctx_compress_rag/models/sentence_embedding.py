"""Sentence encoders for retrieval and for the extractive baseline: the packaged MiniLM, or one that the user names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ctx_compress_rag.errors import ConfigError, needs
from ctx_compress_rag.models.question_minilm import question_minilm
from ctx_compress_rag.text.tokenizing import replace_surrogates

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from ctx_compress_rag.models.minilm import MiniLm

PACKAGED = "minilm"  # the name of the MiniLM that comes as a package and needs no download


@cache
def load_embedder(name: str) -> MiniLm | SentenceTransformer:
    """Return a model on the CPU, loaded once, for "minilm", a folder or a hub id (downloaded); else ConfigError."""
    if name == PACKAGED:
        from ctx_compress_rag.models.minilm import MiniLm

        return MiniLm()
    with needs("sentences"):
        from sentence_transformers import SentenceTransformer
    from ctx_compress_rag.models.loading import progress_line

    try:
        with progress_line(f"loading the embedder {name}"):
            return SentenceTransformer(name, device="cpu", model_kwargs={"use_safetensors": True})  # never pickle
    except Exception as error:  # transformers raises many kinds
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot load embedder {name!r} ({reason}): give {PACKAGED!r}, a folder or hub id") from error


def embed_passages(texts: Sequence[str], embedder: str = PACKAGED) -> Any:
    """Return unit vectors of passages, float32 NumPy (texts, dim). Longer texts than the embedder's limit are cut."""
    try:
        encode: Callable[..., Any] = load_embedder(embedder).encode_document
    except ModuleNotFoundError:  # torch, where a process only answers
        encode = question_minilm().encode
    return _vectors(encode, texts)


def embed_questions(texts: Sequence[str], embedder: str = PACKAGED) -> Any:
    """Return unit vectors of questions, as `embed_passages` does for passages."""
    return _vectors(question_minilm().encode if embedder == PACKAGED else load_embedder(embedder).encode_query, texts)


def _vectors(encode: Callable[..., Any], texts: Sequence[str]) -> Any:
    return encode([replace_surrogates(text) for text in texts], normalize_embeddings=True, show_progress_bar=False)
