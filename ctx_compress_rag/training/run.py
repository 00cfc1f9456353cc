"""Find, read and validate recipes, and run them, for `ctx-compress train`; only the same recipe resumes a training."""

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout

from ctx_compress_rag.bundle.files import REPORT_FILE, read_bundle_report
from ctx_compress_rag.errors import ConfigError, TimeUpError
from ctx_compress_rag.models.identity import file_sha256, files_digest
from ctx_compress_rag.strict import any_of, faults_raised_as
from ctx_compress_rag.training.config import BaseRecipe
from ctx_compress_rag.training.engine.loop import train_job, training_processes
from ctx_compress_rag.training.engine.saved_states import FOLDER, complete_checkpoints, write_errors_named, write_json

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
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # some numbers and dates; other encodings
        said = " ".join(str(error).split())
        raise ConfigError(f"{file} is not valid YAML in UTF-8 ({said}): correct it") from None
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


logger = logging.getLogger(__name__)

_LOCK_FILE = "training.lock"
_FILES_KEY = "files_sha256"
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


def run_recipe(path: str | Path, resume: bool = True, deadline: float | None = None) -> Path:
    """Run a recipe to its end, and return its output folder; `accelerate launch` shares each batch among processes.

    Args:
        path: a YAML file, or the name of a shipped recipe.
        resume: whether to resume from the last checkpoint and to skip a finished recipe; False starts again.
        deadline: when to stop, in seconds of `time.monotonic`; None sets no limit.

    Raises:
        ConfigError: the output folder holds checkpoints of a recipe with other settings, another process is training
            into it, or a file that the recipe reads is missing.
        TimeUpError: the deadline came before the end. What is trained by then is saved; the same call resumes.
        TrainingError: the loss or a weight became NaN or infinite.
        OSError: a file cannot be written.
    """
    recipe = load_recipe(path)
    if resume and is_recipe_finished(recipe):
        return recipe.output
    if deadline is not None and time.monotonic() >= deadline:
        raise TimeUpError(f"{path}: not started; the same command resumes there")
    check_recipe_inputs([recipe])  # before a model is loaded
    training_processes()
    torch.manual_seed(recipe.seed)
    # Softmax tails and Adam's moments reach subnormal numbers, on which a CPU is slow. Threads inherit
    # this setting when they start, so set it before any work.
    torch.set_flush_denormal(True)
    recipe.output.mkdir(parents=True, exist_ok=True)
    with _alone(recipe.output):
        if resume:
            _refuse_another(recipe)
        logger.info("%s: %d steps, seed %d, into %s", path, recipe.optim.steps, recipe.seed, recipe.output)
        # Before they are read: they may be edited during the training.
        files = _file_digests(recipe) if training_processes().is_main_process else {}
        job = recipe.make_job()
        if training_processes().is_main_process:
            _keep_recipe(recipe, resume, files)  # only now: an error in the recipe must not remove earlier checkpoints
        report = train_job(job, recipe.optim, recipe.output, recipe.seed, resume, deadline)
        if training_processes().is_main_process:
            report |= {"recipe": recipe.model_dump(mode="json"), _FILES_KEY: files}
            with write_errors_named(recipe.output):
                job.save(report)
            if report["steps"] == recipe.optim.steps:  # which means that the recipe is finished
                write_json(recipe.output / REPORT_FILE, report)
        training_processes().wait_for_everyone()  # the next recipe may need what the main process has written
    if report["steps"] < recipe.optim.steps:
        raise TimeUpError(
            f"{recipe.output}: stopped at step {report['steps']} of {recipe.optim.steps}, with what is trained saved; "
            "the same command resumes there"
        )
    return recipe.output


def check_recipe_inputs(recipes: Sequence[BaseRecipe]) -> None:
    """Raise a ConfigError if a file or folder that a recipe reads does not exist and no earlier recipe writes it."""
    written: list[Path] = []
    for recipe in recipes:
        for path in [] if is_recipe_finished(recipe) else _inputs(recipe):
            if not path.exists() and not any(path.absolute().is_relative_to(folder) for folder in written):
                raise ConfigError(
                    f"{str(path)!r}, which the recipe with output {str(recipe.output)!r} reads, does not exist, and no "
                    "recipe given before it writes it: correct the path, or first train the recipe that writes it"
                )
        written.append(recipe.output.absolute())


def _alone(output: Path) -> AbstractContextManager[Any]:
    """Keep other trainings out of this folder, because two would delete each other's checkpoints."""
    if not training_processes().is_main_process:
        return nullcontext()
    try:
        return FileLock(output / _LOCK_FILE, timeout=0).acquire()
    except Timeout as error:
        raise ConfigError(
            f"another process is training into {str(output)!r}: wait until it ends, stop it, or choose another output"
        ) from error


def is_recipe_finished(recipe: BaseRecipe) -> bool:
    """Whether exactly this recipe has been run to its end, on files with their current contents."""
    report = read_bundle_report(recipe.output / REPORT_FILE)
    same = report.get("recipe") == recipe.model_dump(mode="json")
    return same and not _changed_files(recipe, report.get(_FILES_KEY, {}))


def _refuse_another(recipe: BaseRecipe) -> None:
    folder = recipe.output / FOLDER
    file = folder / _RECIPE_FILE
    if not file.exists() or not complete_checkpoints(recipe.output):
        return
    if changed := list(_changed(recipe, read_bundle_report(file))):
        raise ConfigError(
            f"{folder} holds a training with other settings ({'; '.join(changed)}): restore those settings, choose "
            "another output, or start again with --no-resume"
        )


def _keep_recipe(recipe: BaseRecipe, resume: bool, files: Mapping[str, str]) -> None:
    """Save recipe and digests of its `files` with its checkpoints; remove an earlier report, or everything earlier."""
    folder = recipe.output / FOLDER
    # With an earlier report, a training that is interrupted from now on would count as finished.
    (recipe.output / REPORT_FILE).unlink(missing_ok=True)
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _RECIPE_FILE, recipe.model_dump(mode="json") | {_FILES_KEY: dict(files)})


def _inputs(settings: Any) -> Iterator[Path]:
    """Yield the files and folders that a recipe reads, except decoders, which may be names on the hub."""
    settings = settings.model_dump() if isinstance(settings, BaseRecipe) else settings
    if isinstance(settings, Path):
        yield settings
    elif isinstance(settings, dict | list):
        for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
            if key != "output":
                yield from _inputs(value)


def _file_digests(recipe: BaseRecipe) -> dict[str, str]:
    """Return the SHA-256 of a recipe's files, and of the weights in its folders, by path; skip missing paths."""
    models = {getattr(recipe, key, None) for key in ("decoder", "bundle")}
    paths = {*_inputs(recipe), *(Path(name) for name in models if isinstance(name, str))}
    return {
        str(path): file_sha256(path) if path.is_file() else folder_weights_digest(path)
        for path in paths
        if path.exists()
    }


def folder_weights_digest(folder: Path) -> str:
    """Return the SHA-256 (hex) of names and contents of a folder's safetensors files; without any, its subfolders'."""
    return files_digest(sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*/*.safetensors")))  # a bundle's


def _changed_files(recipe: BaseRecipe, before: Mapping[str, str]) -> list[str]:
    """Return the paths whose contents have changed since `before`. A path that is missing or new does not count."""
    return [path for path, digest in _file_digests(recipe).items() if before.get(path, digest) != digest]


def _changed(recipe: BaseRecipe, before: Any) -> Iterator[str]:
    """Yield the keys that differ from the checkpoint's recipe, with both values, and the files that have changed."""
    files = before.pop(_FILES_KEY, {})
    old, new = _flat(before), _flat(recipe.model_dump(mode="json"))
    for key in sorted((old.keys() | new.keys()) - _MAY_CHANGE):
        if old.get(key) != new.get(key):
            yield f"{key} {old.get(key)!r} there, {new.get(key)!r} in the recipe"
    for path in _changed_files(recipe, files):
        yield f"{path} with other contents"


def _flat(settings: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return flat
