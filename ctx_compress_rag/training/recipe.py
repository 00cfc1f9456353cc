"""Find, read and validate the recipes of `ctx-compress train`."""

from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.strict import any_of, faults_raised_as
from ctx_compress_rag.training.config import BaseRecipe

_PACKAGE = Path(__file__).parents[1]
SHIPPED = _PACKAGE / "training" / "recipes"
# Other rooms that ship recipes have stages, too, which are imported only for their own recipes.
FOLDERS = [SHIPPED, *sorted(folder for folder in _PACKAGE.glob("*/recipes") if folder != SHIPPED)]


def find_recipe(name: str) -> Path | None:
    """Return the path of a shipped recipe (`ram/ram.yaml`) or folder of recipes (`ram`); None if there is none."""
    return next((folder / name for folder in FOLDERS if (folder / name).exists()), None)


def load_recipe(path: str | Path) -> BaseRecipe:
    """Read a recipe from a YAML file, or a shipped recipe by its name (`mean_pooling/teacher`).

    Raises ConfigError if there is no such recipe, or a key or value is invalid.
    """
    file = Path(path) if Path(path).is_file() else find_recipe(str(path)) or find_recipe(f"{path}.yaml")
    if file is None or not file.is_file():
        names = sorted(str(f.relative_to(folder).with_suffix("")) for folder in FOLDERS for f in folder.rglob("*.yaml"))
        raise ConfigError(f"no recipe {str(path)!r}: give a YAML file or one of {', '.join(names)}")
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    return parse_recipe(settings, str(file))


def recipe_names(name: str) -> list[str]:
    """Return the paths of the recipes in the folder `name` (perhaps shipped), sorted, or [name] if it is no folder."""
    folder = Path(name) if Path(name).is_dir() else find_recipe(name)
    return sorted(str(file) for file in folder.glob("*.yaml")) if folder and folder.is_dir() else [name]


def parse_recipe(settings: Any, where: str) -> BaseRecipe:
    """Make a recipe from its keys and values. Raise ConfigError, which names `where`, if one of them is invalid."""
    stage = settings.get("stage") if isinstance(settings, dict) else None
    for folder in FOLDERS:
        if stage not in list(BaseRecipe.stages):  # it may be anything, also what has no hash
            import_module(f"{_PACKAGE.name}.{folder.parent.name}.stages")
    if stage is None:
        stages = ", ".join(sorted(BaseRecipe.stages))
        raise ConfigError(f"{where} has no stage, which says what to train: set stage to one of {stages}")
    with faults_raised_as(ConfigError, f"{where}: "):
        recipe: BaseRecipe = any_of(tuple(BaseRecipe.stages.values()), "stage").validate_python(settings)
    return recipe
