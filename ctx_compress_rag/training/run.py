"""Run a recipe, for `ctx-compress train`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ctx_compress_rag.bundle.files import REPORT_FILE
from ctx_compress_rag.errors import ConfigError, TimeUpError
from ctx_compress_rag.training.config import BaseRecipe
from ctx_compress_rag.training.engine.loop import train
from ctx_compress_rag.training.engine.processes import processes
from ctx_compress_rag.training.engine.saved_states import write_errors_named, write_json
from ctx_compress_rag.training.recipe import STAGES, load_recipe
from ctx_compress_rag.training.resuming import (
    FILES_KEY,
    changed_files,
    file_digests,
    inputs,
    keep_recipe,
    refuse_another,
)

logger = logging.getLogger(__name__)

_LOCK_FILE = "training.lock"


def run_recipe(path: str | Path, resume: bool = True, deadline: float | None = None) -> Path:
    """Run a recipe to its end, and return its output folder.

    Under `accelerate launch` each process trains on its share of every batch.

    Args:
        path: a YAML file, or the name of a shipped recipe.
        resume: whether to resume from the last checkpoint and to skip a finished recipe; otherwise start again.
        deadline: when to stop, in seconds of `time.monotonic`; None sets no limit.

    Raises:
        ConfigError: the output folder holds checkpoints of a recipe with other settings, another process is training
            into it, or a file that the recipe reads is missing.
        TimeUpError: the deadline came before the end. The same call resumes there.
        TrainingError: the loss or a weight became NaN or infinite.
        OSError: a file cannot be written.
    """
    recipe = load_recipe(path)
    if resume and is_finished(recipe):
        return recipe.output
    if deadline is not None and time.monotonic() >= deadline:
        raise TimeUpError(f"{path}: not started; the same command resumes there")
    check_inputs([recipe])  # before a model is loaded
    processes()
    torch.manual_seed(recipe.seed)
    # Softmax tails and Adam's moments reach subnormal numbers, on which a CPU is slow. Threads inherit
    # this setting when they start, so set it before any work.
    torch.set_flush_denormal(True)
    recipe.output.mkdir(parents=True, exist_ok=True)
    with _alone(recipe.output):
        if resume:
            refuse_another(recipe)
        logger.info("%s: %d steps, seed %d, into %s", path, recipe.optim.steps, recipe.seed, recipe.output)
        # Before they are read: they may be edited during the training.
        files = file_digests(recipe) if processes().is_main_process else {}
        _, start = STAGES[recipe.stage]
        job = start(recipe)
        if processes().is_main_process:
            keep_recipe(recipe, resume, files)  # only now: an error in the recipe must not remove earlier checkpoints
        report = train(job, recipe.optim, recipe.output, recipe.seed, resume, deadline)
        if processes().is_main_process:
            report |= {"recipe": recipe.model_dump(mode="json"), FILES_KEY: files}
            with write_errors_named(recipe.output):
                job.save(report)
            write_json(recipe.output / REPORT_FILE, report)
        processes().wait_for_everyone()  # the next recipe may need what the main process has written
    return recipe.output


def check_inputs(recipes: Sequence[BaseRecipe]) -> None:
    """Raise a ConfigError if a file or folder that a recipe reads does not exist and no earlier recipe writes it."""
    written: list[Path] = []
    for recipe in recipes:
        for path in [] if is_finished(recipe) else inputs(recipe):
            if not path.exists() and not any(path.absolute().is_relative_to(folder) for folder in written):
                raise ConfigError(
                    f"{str(path)!r}, which the recipe with output {str(recipe.output)!r} reads, does not exist, and no "
                    "recipe given before it writes it: correct the path, or first train the recipe that writes it"
                )
        written.append(recipe.output.absolute())


def _alone(output: Path) -> AbstractContextManager[Any]:
    """Keep other trainings out of this folder, because two would delete each other's checkpoints."""
    if not processes().is_main_process:
        return nullcontext()
    try:
        return FileLock(output / _LOCK_FILE, timeout=0).acquire()
    except Timeout as error:
        raise ConfigError(
            f"another process is training into {str(output)!r}: wait until it ends, stop it, or choose another output"
        ) from error


def is_finished(recipe: BaseRecipe) -> bool:
    """Whether exactly this recipe has been run to its end, on files with their current contents."""
    file = recipe.output / REPORT_FILE
    if not file.exists():
        return False
    report = json.loads(file.read_text(encoding="utf-8"))
    same = report.get("recipe") == recipe.model_dump(mode="json")
    return same and not changed_files(recipe, report.get(FILES_KEY, {}))
