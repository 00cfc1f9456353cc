"""Imports of optional packages, with an error that names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ctx_compress_rag.errors import MissingExtraError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Raise a MissingExtraError that says how to install the extra if an import in the `with` block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed: run pip install 'ctx-compress-rag[{extra}]'", name=error.name
        ) from error
