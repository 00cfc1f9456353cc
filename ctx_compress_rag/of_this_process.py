"""Objects that hold a model or an open store."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from ctx_compress_rag.errors import ConfigError


class OfThisProcess:
    """Cannot be pickled, and a deep copy of what holds one shares it."""

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled, and say what to do."""
        raise ConfigError(f"a {type(self).__name__} belongs to this process: open it in the other one")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself."""
        return self
