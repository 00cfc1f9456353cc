"""Pictures of compression tokens: how their attention is distributed over a passage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.pictures.allocation import allocation, allocation_figure, allocation_means
from ctx_compress_rag.methods.compression_tokens.compressor import CompressionTokensCompressor
from ctx_compress_rag.text.tokenizing import text_ids


def attention(bundle: Any, texts: Sequence[str], ratio: int) -> dict[str, Any]:
    """How much a passage's compression tokens attend to the same tokens (ComprExIT, figures 3 and 4).

    Returns: for one text `allocation.json` and `allocation.png`; for several, their means in `allocation.json`.
    """
    compressor = cast(CompressionTokensCompressor, bundle.compressor)
    ids = [text_ids(bundle.tokenizer, text)[: bundle.config.max_tokens] for text in texts]
    weights = [_attention(compressor, each, ratio) for each in ids]
    found = [allocation(each) for each in weights]
    if len(texts) > 1:
        return {"allocation.json": {"ratio": ratio, "passages": len(texts), **allocation_means(found)}}
    tokens = [bundle.tokenizer.decode([id]) for id in ids[0]]
    numbers = {"ratio": ratio, "tokens": tokens, "attention": weights[0].tolist(), **found[0].numbers()}
    return {"allocation.json": numbers, "allocation.png": allocation_figure(found[0])}


@torch.no_grad()
def _attention(compressor: CompressionTokensCompressor, ids: Sequence[int], ratio: int) -> Tensor:
    """How a passage's compression tokens attend to its tokens, averaged over layers and heads; on the CPU.

    Each compression token's weights are normalized over the passage; attention to a BOS and to other
    compression tokens is left out.

    Shape: (tokens,) -> (tokens, slots)
    """
    input_ids = torch.tensor([ids], device=compressor.backbone.device)
    with compressor.trunk() as trunk:
        before = trunk.config._attn_implementation
        trunk.set_attn_implementation("eager")  # the only kind that returns its weights
        try:
            inputs, (text, slots) = compressor.inputs(input_ids, torch.ones_like(input_ids), [ratio])
            layers = trunk(**inputs, output_attentions=True).attentions
        finally:
            trunk.set_attn_implementation(before)
    weights = torch.stack([layer[0, :, -slots:, text - len(ids) : text].float() for layer in layers]).mean((0, 1))
    return (weights / weights.sum(-1, keepdim=True)).T.cpu()
