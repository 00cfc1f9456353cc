"""The stages of training, which register themselves."""

from ctx_compress_rag.training.stages import compression, packed, teacher

__all__ = ["compression", "packed", "teacher"]
