"""Sentence slots, and xRAG with one slot per passage."""

from ctx_compress_rag.methods.base.method import Method, register
from ctx_compress_rag.methods.base.projections import TwoLayerMap
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.methods.sentence_slots.compressor import SentenceSlotsCompressor
from ctx_compress_rag.methods.sentence_slots.config import SentenceSlotsConfig

register(
    Method(
        config=SentenceSlotsConfig,
        compressor=SentenceSlotsCompressor,
        reader=lambda backbone, config, compressor: Reader(
            backbone, TwoLayerMap(compressor.dim, backbone.dim), config.decoder
        ),
        paper="ArcAligner: Adaptive Recursive Aligner for Compressed Context Embeddings in RAG",
    )
)
