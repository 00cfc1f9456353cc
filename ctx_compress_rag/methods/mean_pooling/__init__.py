"""Mean pooling."""

from ctx_compress_rag.methods.base.method import Method, register
from ctx_compress_rag.methods.base.projections import LinearMap
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.methods.mean_pooling.compressor import MeanPoolingCompressor
from ctx_compress_rag.methods.mean_pooling.config import MeanPoolingConfig

register(
    Method(
        config=MeanPoolingConfig,
        compressor=MeanPoolingCompressor,
        reader=lambda backbone, config, compressor: Reader(
            backbone, LinearMap(compressor.dim, backbone.dim) if config.linear else None, config.decoder
        ),
        paper="Simple Context Compression: Mean-Pooling and Multi-Ratio Training",
    )
)
