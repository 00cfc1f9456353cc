"""The stages of training, one a file, which register themselves; methods may have stages of their own."""

import pkgutil
from importlib import import_module

from ctx_compress_rag.methods.registry import METHODS

for _found in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_found.name)
for _method in METHODS.values():
    if _method.training is not None:
        import_module(_method.training)
