"""The description of a method, and the table in which methods register themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctx_compress_rag.methods.base.compressor import Compressor
from ctx_compress_rag.methods.base.config import MethodConfig
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.models.backbone import Backbone


@dataclass(frozen=True)
class Method:
    """A compression method, as bundles and recipes use it."""

    config: type[MethodConfig]  # whose literal `name` is the method's name
    compressor: Callable[[Backbone, Any], Compressor]  # from the decoder and the settings
    reader: Callable[[Backbone, Any, Any], Reader]  # from the decoder, the settings and the compressor
    paper: str  # its title


METHODS: dict[str, Method] = {}  # by the literal `name` of their settings
