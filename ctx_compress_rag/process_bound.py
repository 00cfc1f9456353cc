"""Objects that hold a model or an open store."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from ctx_compress_rag.errors import ConfigError


class ProcessBound:
    """Base of objects that cannot be pickled, and that deep copies share."""

    def __getstate__(self) -> NoReturn:
        raise ConfigError(f"a {type(self).__name__} cannot be pickled: open it in the other process")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
