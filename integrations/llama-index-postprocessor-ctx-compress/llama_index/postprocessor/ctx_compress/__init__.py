"""LlamaIndex postprocessor that replaces retrieved text with soft contexts."""

from llama_index.postprocessor.ctx_compress.base import CompressedContextPostprocessor, CompressSoftContext
from llama_index.postprocessor.ctx_compress.nodes import CompressedTextNode, restore_sources

__all__ = ["CompressSoftContext", "CompressedContextPostprocessor", "CompressedTextNode", "restore_sources"]
