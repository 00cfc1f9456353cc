"""The stages of training, one a file, which register themselves; methods may have stages of their own."""

from importlib import import_module

from ctx_compress_rag.methods.registry import METHODS
from ctx_compress_rag.training.stages import (
    answer,
    distillation,
    next_token,
    reconstruction,
    repeat_and_answer,
    teacher,
)

__all__ = ["answer", "distillation", "next_token", "reconstruction", "repeat_and_answer", "teacher"]

for _method in METHODS.values():
    if _method.training is not None:
        import_module(_method.training)
