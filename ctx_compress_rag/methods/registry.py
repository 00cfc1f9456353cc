"""Find all methods: those of this package, which register themselves, and those of other packages.

Another package declares the module that registers its methods as an entry point of the group
`ctx_compress_rag.methods`, so that their recipes and bundles load without an import.
"""

import pkgutil
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

import ctx_compress_rag.methods as methods
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.config import MethodConfig
from ctx_compress_rag.strict import any_of

for _found in pkgutil.iter_modules(methods.__path__, f"{methods.__name__}."):
    if _found.name != __name__:
        import_module(_found.name)
for _entry in entry_points(group="ctx_compress_rag.methods"):
    try:
        _entry.load()
    except Exception as error:
        package = "" if _entry.dist is None else f" of the package {_entry.dist.name}"
        raise ConfigError(
            f"the method {_entry.name!r}{package} cannot be loaded ({type(error).__name__}: {error}): repair that "
            "package, or uninstall it"
        ) from error


def _of_its_class(settings: Any) -> MethodConfig:
    config: MethodConfig = any_of(tuple(MethodConfig.methods.values()), "name").validate_python(settings)
    return config


AnyMethodConfig = Annotated[SerializeAsAny[MethodConfig], BeforeValidator(_of_its_class)]
"""The settings of any registered method, told apart by `name`."""
