"""Recipes run by several processes of this machine, as torchrun runs them: forks of one that has imported it all."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def run_by(count: int, folder: Path, *tasks: tuple[Any, ...]) -> list[list[dict[str, Any]]]:
    """Each process runs the tasks in turn; returns what each of them held after the last step of each "train".

    Args:
        count: how many processes.
        folder: a place for what they tell.
        tasks: ("train", recipe); ("kill", recipe, steps), which breaks it off after so many; ("refuse", recipe), which
            cannot go on from its checkpoint; ("hurry", recipe), which only the first process has no time for.
    """
    folder.mkdir()
    command = [sys.executable, "-m", "helpers.processes", str(count), str(folder), json.dumps(tasks, default=str)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=settings)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def _held(model: Any, optimizer: Any) -> dict[str, Any]:
    """Numbers of this process: of parameters and optimiser states, and bytes of all floats that are alive."""
    import torch
    from torch.distributed.tensor import DTensor

    def own(tensor: Any) -> int:
        return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel())

    gc.collect()  # what trainings that were broken off have left
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    plain = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not isinstance(t, DTensor)]
    floats = [t for t in plain if t.is_floating_point() and t.device.type == "cpu"]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in floats}
    return {
        "trained": sum(own(p) for p in model.parameters() if p.requires_grad),
        "states": sum(map(own, states)),
        "bytes": sum(storages.values()),
        "bytes in modules": sum(_bytes_in_modules().values()),
    }


def _bytes_in_modules() -> dict[int, int]:
    """Of what modules that are alive hold, by storage."""
    import torch
    from torch.distributed.tensor import DTensor

    modules = [m for m in gc.get_objects() if isinstance(m, torch.nn.Module)]
    tensors = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in own}


def _run(rank: int, tasks: list[Any]) -> list[dict[str, Any]]:
    import pytest
    from transformers import TrainerCallback, trainer

    from ctx_compress_rag.errors import ConfigError, TimeUpError
    from ctx_compress_rag.training.run import run_recipe
    from helpers.training import killed

    held: list[dict[str, Any]] = []

    class Holding(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
            if state.global_step == state.max_steps:
                held.append(_held(model, optimizer))

    trainer.DEFAULT_CALLBACKS.append(Holding)
    for what, recipe, *after in tasks:
        if what == "kill":
            with killed(after[0]):
                run_recipe(recipe)
        elif what == "refuse":
            with pytest.raises(ConfigError, match="without `shard: all`"):
                run_recipe(recipe)
        elif what == "hurry":
            with pytest.raises(TimeUpError):
                run_recipe(recipe, deadline=time.monotonic() + (0.1 if rank == 0 else 3600))
        else:
            run_recipe(recipe)
    return held


def _main(count: int, folder: Path, tasks: list[Any]) -> int:
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    import torch
    import torch.distributed.checkpoint
    import transformers.trainer  # noqa: F401

    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(count):
        if process := os.fork():
            processes.append(process)
            continue
        os.environ |= {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        try:
            (folder / f"{rank}.json").write_text(json.dumps(_run(rank, tasks)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    failed = 0
    while processes:
        process, status = os.wait()
        processes.remove(process)
        if status and not failed:
            failed = 1
            for other in processes:  # which wait for the one that failed
                os.kill(other, 9)
    return failed


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])))
