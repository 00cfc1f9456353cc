"""Checkpoints: trained parameters, optimizer states, averages and random states, in safetensors.

They are torch's distributed checkpoints: each process writes its parts, and any number of processes can read them,
whether weights are sharded or not.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.json_files import write_json
from ctx_compress_rag.training.engine.averaging import WeightAverage
from ctx_compress_rag.training.engine.optimizers import trained
from ctx_compress_rag.training.engine.processes import is_main_process, process_count, process_rank

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
_PROGRESS_FILE = "progress.json"
_KEPT = 2


def save_checkpoint(
    output: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    average: WeightAverage | None,
    progress: dict[str, Any],
) -> None:
    """Write a checkpoint, which every process must call, and remove all but the last two.

    Args:
        output: the recipe's output folder.
        model: its trained parameters are saved.
        optimizers: their states are saved.
        average: the average of the weights, if there is one.
        progress: what the loop needs to continue, as JSON; `step` is the number of steps made.

    Raises:
        OSError: a file cannot be written.
    """
    folder = output / FOLDER / f"checkpoint-{progress['step']}"
    state = _training_state(model, average)
    states = _optimizer_states(optimizers)
    for name, p in trained(model).items():
        state |= {f"{name}/{key}": value for key, value in states[p].items()}
    state |= {f"random/{process_rank()}/{device}": value for device, value in _random_states().items()}
    with writing(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of a single process
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(state, storage_writer=writer, no_dist=process_count() == 1)
    if is_main_process():
        write_json(folder / _PROGRESS_FILE, progress)  # now it is complete
        for old in complete_checkpoints(output)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    checkpoint: Path, model: nn.Module, optimizers: Sequence[Optimizer], average: WeightAverage | None
) -> dict[str, Any]:
    """Restore what `save_checkpoint` wrote, however many processes wrote it, and return its progress.

    Raises:
        ConfigError: it is of another model.
    """
    reader = HuggingFaceStorageReader(str(checkpoint))
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state, states, random = _training_state(model, average), _optimizer_states(optimizers), _random_states()
    for name, p in trained(model).items():
        for key in (key for key in stored if key.startswith(f"{name}/")):
            shape, dtype = stored[key].size, stored[key].properties.dtype
            like = torch.zeros_like(p, dtype=dtype) if shape == p.shape else p.new_zeros(shape, dtype=dtype)
            state[key] = states[p][key.removeprefix(f"{name}/")] = like
    if odd := state.keys() ^ {key for key in stored if not key.startswith("random/")}:
        raise ConfigError(
            f"{checkpoint} is of another model: {len(odd)} tensors differ, for example {min(odd)}; choose another "
            "output, or start again with --no-resume"
        )
    own = {f"random/{process_rank()}/{device}": value for device, value in random.items()}
    state |= {key: value for key, value in own.items() if key in stored}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(state, storage_reader=reader, no_dist=process_count() == 1)
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
    return dict(json.loads((checkpoint / _PROGRESS_FILE).read_text(encoding="utf-8")))


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Copy a checkpoint's trained parameters into a model, in this process alone."""
    load(_training_state(model, None), storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)


def _training_state(model: nn.Module, average: WeightAverage | None) -> dict[str, Any]:
    averages = average.state() if average else {}
    state = {name: p.detach() for name, p in trained(model).items()}
    return state | {f"average/{name}": value for name, value in averages.items()}


def _optimizer_states(optimizers: Sequence[Optimizer]) -> dict[nn.Parameter, dict[str, Any]]:
    """What the optimizers keep of each parameter; nothing before the first step."""
    return {p: o.state[p] for o in optimizers for group in o.param_groups for p in group["params"]}


def _random_states() -> dict[str, Tensor]:
    """The state of each random number generator, on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def last_checkpoint(output: Path, steps: int) -> Path | None:
    """The last complete checkpoint; the main process removes incomplete ones.

    Raises:
        ConfigError: its step is beyond the recipe's last.
    """
    complete = complete_checkpoints(output)
    for half in set(_all(output)) - set(complete) if is_main_process() else ():
        logger.warning("%s is incomplete: removing it", half)
        shutil.rmtree(half, ignore_errors=True)
    if not complete:
        return None
    if step_of(complete[-1]) > steps:
        raise ConfigError(
            f"{complete[-1]} is beyond the recipe's {steps} steps: give it more steps, choose another output, or start "
            "again with --no-resume"
        )
    return complete[-1]


def _all(output: Path) -> list[Path]:
    return sorted((output / FOLDER).glob("checkpoint-*"), key=step_of)


def complete_checkpoints(output: Path) -> list[Path]:
    """The checkpoints that were written to their end, in the order of their steps."""
    return [folder for folder in _all(output) if (folder / _PROGRESS_FILE).exists()]


def step_of(checkpoint: Path) -> int:
    """How many steps a checkpoint's training had made."""
    return int(checkpoint.name.rpartition("-")[2])


@contextmanager
def writing(what: Path) -> Iterator[None]:
    """Name what cannot be written: on a full disk, torch and safetensors raise errors that do not say so.

    Raises:
        OSError: a file cannot be written.
    """
    try:
        yield
    except (RuntimeError, SafetensorError, CheckpointException) as error:
        cause = str(error).strip().splitlines()[-2 if isinstance(error, CheckpointException) else -1]
        raise OSError(
            f"cannot write {what} ({cause}): check that the disk has space; the training resumes at its last checkpoint"
        ) from error
