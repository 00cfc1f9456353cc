"""Check that a training continues only from checkpoints of the same recipe."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctx_compress_rag.bundle.files import REPORT_FILE
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.identity import sha256
from ctx_compress_rag.training.config import BaseRecipe
from ctx_compress_rag.training.engine.saved_states import FOLDER, complete_checkpoints, write_json

FILES_KEY = "files_sha256"
_RECIPE_FILE = "recipe.json"

# These set how a step is computed and where results are kept, not the results; another number of `steps` sets
# when a training ends.
_MAY_CHANGE = {
    "output",
    "optim.steps",
    "optim.micro_batch_size",
    "optim.compile",
    "optim.checkpoint_layers",
    "optim.save_every",
    "optim.log_every",
}


def refuse_another(recipe: BaseRecipe) -> None:
    """Raise a ConfigError if the output folder holds checkpoints of a training with other settings or files."""
    folder = recipe.output / FOLDER
    file = folder / _RECIPE_FILE
    if not file.exists() or not complete_checkpoints(recipe.output):
        return
    if changed := list(_changed(recipe, json.loads(file.read_text(encoding="utf-8")))):
        raise ConfigError(
            f"{folder} holds a training with other settings ({'; '.join(changed)}): restore those settings, choose "
            "another output, or start again with --no-resume"
        )


def keep_recipe(recipe: BaseRecipe, resume: bool, files: Mapping[str, str]) -> None:
    """Save the recipe and the digests of the `files` that it reads beside its checkpoints.

    An earlier training's report is removed, and without `resume` its checkpoints are, too.
    """
    folder = recipe.output / FOLDER
    # With an earlier report, a training that is interrupted from now on would count as finished.
    (recipe.output / REPORT_FILE).unlink(missing_ok=True)
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _RECIPE_FILE, recipe.model_dump(mode="json") | {FILES_KEY: dict(files)})


def inputs(settings: Any) -> Iterator[Path]:
    """Yield the files and folders that a recipe reads, except decoders, which may be names on the hub."""
    settings = settings.model_dump() if isinstance(settings, BaseRecipe) else settings
    if isinstance(settings, Path):
        yield settings
    elif isinstance(settings, dict | list):
        for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
            if key != "output":
                yield from inputs(value)


def file_digests(recipe: BaseRecipe) -> dict[str, str]:
    """Return the SHA-256 of a recipe's files, and of the weights in its folders, by path; skip missing paths."""
    models = {getattr(recipe, key, None) for key in ("decoder", "bundle")}
    paths = {*inputs(recipe), *(Path(name) for name in models if isinstance(name, str))}
    return {str(path): sha256(path) if path.is_file() else weights_digest(path) for path in paths if path.exists()}


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of the weights in the folder of a decoder, an adapter or a bundle: 64 hex digits."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*/*.safetensors"))  # a bundle's
    return hashlib.sha256(" ".join(f"{file.name} {sha256(file)}" for file in files).encode()).hexdigest()


def changed_files(recipe: BaseRecipe, before: Mapping[str, str]) -> list[str]:
    """Return the paths whose contents have changed since `before`. A path that is missing or new does not count."""
    return [path for path, digest in file_digests(recipe).items() if before.get(path, digest) != digest]


def _changed(recipe: BaseRecipe, before: Any) -> Iterator[str]:
    """Yield the keys that differ from the checkpoint's recipe, with both values, and the files that have changed."""
    files = before.pop(FILES_KEY)
    old, new = _flat(before), _flat(recipe.model_dump(mode="json"))
    for key in sorted((old.keys() | new.keys()) - _MAY_CHANGE):
        if old.get(key) != new.get(key):
            yield f"{key} {old.get(key)!r} there, {new.get(key)!r} in the recipe"
    for path in changed_files(recipe, files):
        yield f"{path} with other contents"


def _flat(settings: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return flat
