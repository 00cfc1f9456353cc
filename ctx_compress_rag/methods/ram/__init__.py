"""The method RAM (Read As Human)."""

from ctx_compress_rag.methods.base.method import METHODS, Method
from ctx_compress_rag.methods.base.projections import LinearMap
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.methods.ram.compressor import RamCompressor, RamConfig

METHODS["ram"] = Method(
    config=RamConfig,
    compressor=RamCompressor,
    # W_align of eq. 5 is the reader's map; without skimming it has nothing to map.
    reader=lambda backbone, config, compressor: Reader(
        backbone, None if config.skimming == "none" else LinearMap(compressor.dim, backbone.dim), config.decoder
    ),
    paper="Read As Human: Compressing Context via Parallelizable Close Reading and Skimming",
)
