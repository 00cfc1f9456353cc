"""Memory tokens."""

from ctx_compress_rag.methods.base.method import Method, register
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.methods.memory_tokens.compressor import MemoryTokensCompressor
from ctx_compress_rag.methods.memory_tokens.config import MemoryTokensConfig

register(
    Method(
        config=MemoryTokensConfig,
        compressor=MemoryTokensCompressor,
        reader=lambda backbone, config, compressor: Reader(backbone, None, config.decoder, config.wrap),
        paper="PISCO: Pretty Simple Compression for Retrieval-Augmented Generation",
    )
)
