"""Pictures of compression tokens: how their attention is distributed over a passage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from benchmarks.pictures.allocation import allocation, allocation_figure, allocation_means
from ctx_compress_rag.methods.compression_tokens.compressor import CompressionTokensCompressor
from ctx_compress_rag.text.tokenizing import text_ids


def attention(bundle: Any, texts: Sequence[str], ratio: int) -> dict[str, Any]:
    """How much a passage's compression tokens attend to the same tokens (ComprExIT, figures 3 and 4).

    Returns: for one text `allocation.json` and `allocation.png`; for several, their means in `allocation.json`.
    """
    compressor = cast(CompressionTokensCompressor, bundle.compressor)
    ids = [text_ids(bundle.tokenizer, text)[: bundle.config.max_tokens] for text in texts]
    weights = [compressor.attention(each, ratio) for each in ids]
    found = [allocation(each) for each in weights]
    if len(texts) > 1:
        return {"allocation.json": {"ratio": ratio, "passages": len(texts), **allocation_means(found)}}
    tokens = [bundle.tokenizer.decode([id]) for id in ids[0]]
    numbers = {"ratio": ratio, "tokens": tokens, "attention": weights[0].tolist(), **found[0].numbers()}
    return {"allocation.json": numbers, "allocation.png": allocation_figure(found[0])}
