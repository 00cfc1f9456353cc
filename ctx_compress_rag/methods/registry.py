"""The methods by name: this package's folders, which register themselves, and what others register.

A package of methods names the module that registers them as an entry point of the group `ctx_compress_rag.methods`, so
that recipes and bundles of its methods load without an import.
"""

from __future__ import annotations

import pkgutil
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import entry_points
from operator import or_
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, TypeAdapter

import ctx_compress_rag.methods as methods
from ctx_compress_rag.methods.base.config import MethodConfig
from ctx_compress_rag.methods.base.method import METHODS, Method, register

__all__ = ["METHODS", "AnyMethodConfig", "Method", "register"]

for _found in pkgutil.iter_modules(methods.__path__, f"{methods.__name__}."):
    if _found.ispkg:
        import_module(_found.name)
for _entry in entry_points(group="ctx_compress_rag.methods"):
    _entry.load()


@cache
def _union(classes: tuple[type[MethodConfig], ...]) -> TypeAdapter[MethodConfig]:
    union: Any = Annotated[reduce(or_, classes), Field(discriminator="name")]
    return TypeAdapter(union)


def _of_its_class(settings: Any) -> MethodConfig:
    return _union(tuple(method.config for method in METHODS.values())).validate_python(settings)


AnyMethodConfig = Annotated[SerializeAsAny[MethodConfig], BeforeValidator(_of_its_class)]
"""The settings of any registered method, told apart by `name`."""
