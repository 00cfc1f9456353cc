"""The description of a method, and the table in which methods register themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctx_compress_rag.methods.base.compressor import Compressor
from ctx_compress_rag.methods.base.config import MethodConfig
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.models.backbone import Backbone


@dataclass(frozen=True)
class Method:
    """A compression method.

    Attributes:
        config: the class of its settings, whose literal `name` is the method's.
        compressor: makes the text side from the decoder and the settings.
        reader: makes the decoder side from the decoder, the settings and the compressor.
        paper: the title of its paper.
    """

    config: type[MethodConfig]
    compressor: Callable[[Backbone, Any], Compressor]
    reader: Callable[[Backbone, Any, Any], Reader]
    paper: str


METHODS: dict[str, Method] = {}
"""The registered methods by name."""


def register(method: Method) -> None:
    """Make a method known to bundles and recipes, by its config's name."""
    METHODS[method.config.model_fields["name"].default] = method
