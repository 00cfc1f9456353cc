"""Compressing many passages: batch by batch in this process, or on the workers of a Ray cluster."""

from ctx_compress_rag.bulk.fill import Added, Target, fill, total
from ctx_compress_rag.bulk.worker import CompressPassages

__all__ = ["Added", "CompressPassages", "Target", "fill", "total"]
