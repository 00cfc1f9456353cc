"""The table of methods: which classes a method's config stands for. A new method adds one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctx_compress_rag.backbone import Backbone
from ctx_compress_rag.config import TuneConfig
from ctx_compress_rag.methods.arcaligner.reader import ArcAlignerReader
from ctx_compress_rag.methods.base.compressor import Compressor
from ctx_compress_rag.methods.base.mapped_reader import MappedReader
from ctx_compress_rag.methods.base.projections import LinearMap, TwoLayerMap
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.methods.compression_tokens.compressor import CompressionTokensCompressor
from ctx_compress_rag.methods.comprexit.compressor import ComprexitCompressor
from ctx_compress_rag.methods.mean_pooling.compressor import MeanPoolingCompressor
from ctx_compress_rag.methods.ram.compressor import RamCompressor
from ctx_compress_rag.methods.sentence_slots.compressor import SentenceSlotsCompressor


@dataclass(frozen=True)
class Method:
    """How a method's two sides are made from the decoder and the method's config."""

    compressor: Callable[[Backbone, Any], Compressor]
    reader: Callable[[Backbone, Any, Compressor], Reader]


METHODS: dict[str, Method] = {
    "mean_pooling": Method(
        compressor=MeanPoolingCompressor,
        reader=lambda backbone, config, compressor: MappedReader(
            backbone, LinearMap(compressor.dim, backbone.dim) if config.linear else None, config.decoder
        ),
    ),
    "compression_tokens": Method(
        compressor=CompressionTokensCompressor,
        reader=lambda backbone, config, compressor: MappedReader(
            backbone, LinearMap(compressor.dim, backbone.dim), config.decoder
        ),
    ),
    "sentence_slots": Method(
        compressor=SentenceSlotsCompressor,
        reader=lambda backbone, config, compressor: MappedReader(
            backbone, TwoLayerMap(compressor.dim, backbone.dim), config.decoder
        ),
    ),
    "arcaligner": Method(
        compressor=SentenceSlotsCompressor,
        reader=lambda backbone, config, compressor: ArcAlignerReader(backbone, compressor.dim, config),
    ),
    "comprexit": Method(
        compressor=ComprexitCompressor,
        reader=lambda backbone, config, compressor: MappedReader(
            backbone, TwoLayerMap(compressor.dim, backbone.dim), TuneConfig(mode="frozen")
        ),
    ),
    "ram": Method(
        compressor=RamCompressor,
        # W_align of eq. 5 is the reader's map; without skimming there is nothing for it to map.
        reader=lambda backbone, config, compressor: MappedReader(
            backbone,
            None if config.skimming == "none" else LinearMap(compressor.dim, backbone.dim),
            config.decoder,
        ),
    ),
}
