"""The table of methods: which classes a method's config stands for. A new method adds one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctx_compress_rag.backbone import Backbone
from ctx_compress_rag.compressors.base import Compressor
from ctx_compress_rag.compressors.mean_pooling import MeanPoolingCompressor
from ctx_compress_rag.readers.base import Reader
from ctx_compress_rag.readers.linear import LinearReader


@dataclass(frozen=True)
class Method:
    """How a method's two sides are made from the decoder and the method's config."""

    compressor: Callable[[Backbone, Any], Compressor]
    reader: Callable[[Backbone, Any, Compressor], Reader]


METHODS: dict[str, Method] = {
    "mean_pooling": Method(
        compressor=MeanPoolingCompressor,
        reader=lambda backbone, config, compressor: LinearReader(
            backbone, compressor.dim, config.decoder, config.linear
        ),
    ),
}
