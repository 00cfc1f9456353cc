"""The base class of objects that hold a model or an open store."""

from typing import Any, NoReturn, Self

from ctx_compress_rag.errors import ConfigError


class ProcessBound:
    """Base class of objects that cannot be pickled (ConfigError), and whose deep copy is the object itself."""

    def __getstate__(self) -> NoReturn:
        raise ConfigError(f"a {type(self).__name__} cannot be pickled: open it in the other process")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
