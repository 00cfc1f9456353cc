"""Programs in processes of their own, without what it takes to start Python and import torch each time.

They are forks of one process, started when it is first needed, that has imported this much and opened nothing.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from typing import Any, Self

from helpers.server import free_port

FORKS: Any = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["ctx_compress_rag.indexing.build", "peft"])

COMMAND = "import sys; from ctx_compress_rag.cli import main; sys.exit(main(sys.argv[1:]))"
"""The program `ctx-compress`."""


def _run(code: str, args: Sequence[str], env: Mapping[str, str], out: Any, err: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.dup2(out.fileno(), 1)
    os.dup2(os.open(err, os.O_WRONLY), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv = ["-c", *args]
    exec(code, {"__name__": "__main__"})


class Forked:
    """A running program, as `subprocess.Popen` has it, which can import helpers; killed at the end of the context."""

    def __init__(self, code: str, *args: object, env: Mapping[str, str] | None = None) -> None:
        pipe, end = FORKS.Pipe(duplex=False)
        self._err = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        given = (code, [str(arg) for arg in args], {**os.environ, **(env or {})}, end, self._err.name)
        self._process = FORKS.Process(target=_run, args=given)
        self._process.start()
        end.close()
        self.pid, self.sentinel = self._process.pid, self._process.sentinel
        self.stdout = os.fdopen(os.dup(pipe.fileno()), encoding="utf-8")

    def wait(self, timeout: float = 300) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still running after {timeout} s"
        return int(self._process.exitcode)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.exitcode is None:
            self.send_signal(signal.SIGKILL)
        self.wait()
        self.stdout.close()
        self._err.close()

    def finished(self) -> subprocess.CompletedProcess[str]:
        """How it ended, and all that it wrote."""
        out = self.stdout.read()
        return subprocess.CompletedProcess(["-c"], self.wait(), out, self._err.read())


def run_python(code: str, *args: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    with Forked(code, *args, env=env) as process:
        return process.finished()


_PROCESS = """
import json, sys
from helpers.forked import run_tasks
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

    for what, recipe, *after in tasks:
        if what == "kill":
            with killed(after[0]):
                run_recipe(recipe)
        elif what == "hurry":
            with pytest.raises(TimeUpError):
                run_recipe(recipe, deadline=time.monotonic() + (0.1 if os.environ["RANK"] == "0" else 3600))
        else:
            run_recipe(recipe)
