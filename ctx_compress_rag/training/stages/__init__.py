"""The stages of training, which register themselves."""

import pkgutil
from importlib import import_module

for _found in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_found.name)
