"""The stages of training, which register themselves."""

from ctx_compress_rag.training.stages import compression, packed, pretrain, teacher

__all__ = ["compression", "packed", "pretrain", "teacher"]
