"""Imports of optional packages: a missing one is named together with the extra that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ctx_compress_rag.errors import MissingExtraError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Wrap the import of a package that comes with an extra; the MissingExtraError says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed: run pip install 'ctx-compress-rag[{extra}]'", name=error.name
        ) from error
