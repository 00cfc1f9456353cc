"""Compression tokens."""

from ctx_compress_rag.methods.base.method import Method, register
from ctx_compress_rag.methods.base.projections import LinearMap
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.methods.compression_tokens.compressor import CompressionTokensCompressor
from ctx_compress_rag.methods.compression_tokens.config import CompressionTokensConfig

register(
    Method(
        config=CompressionTokensConfig,
        compressor=CompressionTokensCompressor,
        reader=lambda backbone, config, compressor: Reader(
            backbone, LinearMap(compressor.dim, backbone.dim), config.decoder
        ),
        paper="Simple Context Compression: Mean-Pooling and Multi-Ratio Training",
    )
)
