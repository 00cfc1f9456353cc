"""The old name of `ctx_compress_rag.stores.markers`."""

from __future__ import annotations

import warnings
from typing import Any

from ctx_compress_rag.stores import markers


def __getattr__(name: str) -> Any:
    value = getattr(markers, name)
    warnings.warn("ctx_compress_rag.markers is now ctx_compress_rag.stores.markers", DeprecationWarning, stacklevel=2)
    return value
