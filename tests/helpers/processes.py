"""Recipes run by several processes of this machine, as torchrun runs them."""

from __future__ import annotations

import gc
import json
import os
import time
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from helpers.forked import Forked
from helpers.server import free_port

_PROCESS = """
import json, sys
from pathlib import Path
from helpers.processes import run_tasks
Path(sys.argv[1]).write_text(json.dumps(run_tasks(json.loads(sys.argv[2]))))
"""


def run_by(count: int, folder: Path, *tasks: tuple[Any, ...]) -> list[list[dict[str, Any]]]:
    """Each process runs the tasks in turn; returns what each of them held after the first step of each "train".

    Args:
        count: how many processes.
        folder: a place for what they tell.
        tasks: ("train", recipe); ("kill", recipe, steps), which breaks it off after so many; ("hurry", recipe), which
            only the first process has no time for.
    """
    folder.mkdir()
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    told = [folder / f"{rank}.json" for rank in range(count)]
    with ExitStack() as running:  # those that wait for one that failed are killed
        left = {}
        for rank, file in enumerate(told):
            env = {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            process = running.enter_context(Forked(_PROCESS, file, json.dumps(tasks, default=str), env=env))
            left[process.sentinel] = process
        while left:
            for sentinel in wait(list(left)):
                done = left.pop(sentinel).finished()
                assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(file.read_text()) for file in told]


def _held(optimizer: Any) -> dict[str, Any]:
    """Numbers of this process: of parameters and optimizer states, and bytes of all floats that are alive."""
    from torch.distributed.tensor import DTensor

    def own(tensor: Any) -> int:
        return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel())

    optimizer.zero_grad()
    gc.collect()  # what trainings that were broken off have left
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    plain = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not isinstance(t, DTensor)]
    floats = [t for t in plain if t.is_floating_point() and t.device.type == "cpu"]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in floats}
    return {
        "trained": sum(own(p) for group in optimizer.param_groups for p in group["params"]),
        "states": sum(map(own, states)),
        "bytes": sum(storages.values()),
    }


def run_tasks(tasks: list[Any]) -> list[dict[str, Any]]:
    """What one of the processes does; the environment says which it is."""
    import pytest
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ctx_compress_rag.errors import TimeUpError
    from ctx_compress_rag.training.run import run_recipe
    from helpers.training import killed

    torch.set_num_threads(1)
    held: list[dict[str, Any]] = []
    for what, recipe, *after in tasks:
        if what == "kill":
            with killed(after[0]):
                run_recipe(recipe)
        elif what == "hurry":
            with pytest.raises(TimeUpError):
                run_recipe(recipe, deadline=time.monotonic() + (0.1 if os.environ["RANK"] == "0" else 3600))
        else:
            steps: list[int] = []

            def hold(optimizer: Any, *_: Any, steps: list[int] = steps) -> None:
                if not steps:
                    held.append(_held(optimizer))
                steps.append(1)

            hook = register_optimizer_step_post_hook(hold)
            run_recipe(recipe)
            hook.remove()
    return held
