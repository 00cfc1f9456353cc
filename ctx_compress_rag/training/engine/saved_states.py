"""The checkpoints of a training, by accelerate: trained parameters, optimizer states, averages and random states."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.identity import files_digest
from ctx_compress_rag.training.engine.optimizers import trained_parameters

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
_WEIGHTS_FILE = "trained.safetensors"
_PROGRESS_FILE = "progress.json"
_DIGEST_KEY = "digest"
_KEPT = 2


def keep_trained(accelerator: Accelerator, model: nn.Module) -> None:
    """Make the checkpoints that accelerate saves and loads hold only a model's trained parameters."""

    def save(models: list[Any], weights: list[dict[str, Any]], folder: str) -> None:
        weights.clear()
        if accelerator.is_main_process:
            own = {name: p.detach().cpu().contiguous() for name, p in trained_parameters(model).items()}
            save_file(own, Path(folder, _WEIGHTS_FILE))

    def load(models: list[Any], folder: str) -> None:
        models.clear()
        stored, own = load_file(Path(folder, _WEIGHTS_FILE)), trained_parameters(model)
        if odd := stored.keys() ^ own.keys():
            raise ConfigError(
                f"{folder} is of another model: {len(odd)} tensors differ, for example {min(odd)}; choose another "
                "output, or start again with --no-resume"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(stored[name])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_training_state(accelerator: Accelerator, output: Path, progress: dict[str, Any]) -> None:
    """Write a checkpoint, and remove all but the last two. Every process must call it.

    `progress` is what the loop needs to continue, as JSON; its `step` is the number of steps made.
    """
    folder = output / FOLDER / f"checkpoint-{progress['step']}"
    with write_errors_named(folder):
        accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(folder / _PROGRESS_FILE, progress | {_DIGEST_KEY: _digest(folder)})  # now it is complete
        for old in complete_checkpoints(output)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def load_training_state(accelerator: Accelerator, checkpoint: Path) -> dict[str, Any]:
    """Restore what `save_training_state` wrote, however many processes wrote it, and return its `progress`.

    Raises ConfigError if a file was changed since, as a power failure does, or is missing.
    """
    try:
        progress = dict(json.loads((checkpoint / _PROGRESS_FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        progress = {}
    if progress.get(_DIGEST_KEY) != _digest(checkpoint):
        raise ConfigError(f"{checkpoint} is damaged: delete it, and the training resumes at the checkpoint before it")
    accelerator.load_state(str(checkpoint))
    return progress


def _digest(checkpoint: Path) -> str:
    return files_digest(sorted(file for file in checkpoint.iterdir() if file.name != _PROGRESS_FILE))


def last_checkpoint(accelerator: Accelerator, output: Path, steps: int) -> Path | None:
    """Return the folder of the last complete checkpoint, or None; the main process deletes incomplete ones.

    Raises ConfigError if the checkpoint is beyond the recipe's last step.
    """
    complete = complete_checkpoints(output)
    for half in set(_all(output)) - set(complete) if accelerator.is_main_process else ():
        logger.warning("%s is incomplete: removing it", half)
        shutil.rmtree(half, ignore_errors=True)
    if not complete:
        return None
    if checkpoint_step(complete[-1]) > steps:
        raise ConfigError(
            f"{complete[-1]} is beyond the recipe's {steps} steps: give it more steps, choose another output, or start "
            "again with --no-resume"
        )
    return complete[-1]


def _all(output: Path) -> list[Path]:
    return sorted((output / FOLDER).glob("checkpoint-*"), key=checkpoint_step)


def complete_checkpoints(output: Path) -> list[Path]:
    return [folder for folder in _all(output) if (folder / _PROGRESS_FILE).exists()]


def checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write or replace a JSON file, so that a killed process leaves none half written. Raise OSError as `open`."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


@contextmanager
def write_errors_named(what: Path) -> Iterator[None]:
    """Turn errors of torch and safetensors in the block, which do not tell of a full disk, into OSErrors on `what`."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        cause = str(error).strip().splitlines()[-1]
        raise OSError(
            f"cannot write {what} ({cause}): check that the disk has space; the training resumes at its last checkpoint"
        ) from error
