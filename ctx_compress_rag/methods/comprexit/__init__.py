"""ComprExIT."""

from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.methods.base.method import Method, register
from ctx_compress_rag.methods.base.projections import TwoLayerMap
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.methods.comprexit.compressor import ComprexitCompressor
from ctx_compress_rag.methods.comprexit.config import ComprexitConfig

register(
    Method(
        config=ComprexitConfig,
        compressor=ComprexitCompressor,
        reader=lambda backbone, config, compressor: Reader(
            backbone, TwoLayerMap(compressor.dim, backbone.dim), TuneConfig(mode="frozen")
        ),
        paper="Context Compression via Explicit Information Transmission",
    )
)
