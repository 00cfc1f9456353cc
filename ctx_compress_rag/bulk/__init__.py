"""Compressing many passages: batch by batch in this process, or on the workers of a Ray cluster."""

from ctx_compress_rag.bulk.fill import Added, Soft, Target, fill, shown, total
from ctx_compress_rag.bulk.worker import CompressPassages

__all__ = ["Added", "CompressPassages", "Soft", "Target", "fill", "shown", "total"]
