"""ArcAligner."""

from ctx_compress_rag.methods.arcaligner.config import ArcAlignerConfig
from ctx_compress_rag.methods.arcaligner.reader import ArcAlignerReader
from ctx_compress_rag.methods.base.method import Method, register
from ctx_compress_rag.methods.sentence_slots.compressor import SentenceSlotsCompressor

register(
    Method(
        config=ArcAlignerConfig,
        compressor=SentenceSlotsCompressor,
        reader=lambda backbone, config, compressor: ArcAlignerReader(backbone, compressor.dim, config),
        paper="ArcAligner: Adaptive Recursive Aligner for Compressed Context Embeddings in RAG",
    )
)
