"""Recipes run by several processes of this machine, as `accelerate launch` runs them."""

import json
import os
import time
from contextlib import ExitStack
from multiprocessing.connection import wait
from typing import Any

import torch

from helpers.forked import Forked
from helpers.server import free_port

_PROCESS = """
import json, sys
from helpers.processes import run_tasks
run_tasks(json.loads(sys.argv[1]))
"""


def run_by(count: int, *tasks: tuple[Any, ...]) -> None:
    """Each process runs the tasks in turn.

    Args:
        count: how many processes.
        tasks: ("train", recipe); ("kill", recipe, steps), which breaks it off after so many; ("hurry", recipe), which
            only the first process has no time for.
    """
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ExitStack() as running:  # those that wait for one that failed are killed
        left = {}
        for rank in range(count):
            env = {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            process = running.enter_context(Forked(_PROCESS, json.dumps(tasks, default=str), env=env))
            left[process.sentinel] = process
        while left:
            for sentinel in wait(list(left)):
                done = left.pop(sentinel).finished()
                assert done.returncode == 0, done.stderr[-4000:]


def run_tasks(tasks: list[Any]) -> None:
    """What one of the processes does; the environment says which it is."""
    import pytest

    from ctx_compress_rag.errors import TimeUpError
    from ctx_compress_rag.training.run import run_recipe
    from helpers.training import killed

    torch.set_num_threads(1)
    for what, recipe, *after in tasks:
        if what == "kill":
            with killed(after[0]):
                run_recipe(recipe)
        elif what == "hurry":
            with pytest.raises(TimeUpError):
                run_recipe(recipe, deadline=time.monotonic() + (0.1 if os.environ["RANK"] == "0" else 3600))
        else:
            run_recipe(recipe)
