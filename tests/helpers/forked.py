"""Programs in processes of their own, without what it takes to start Python and import torch each time.

They are forks of one process, started when it is first needed, that has imported this much and opened nothing.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Self

FORKS: Any = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["ctx_compress_rag.indexing.build", "sentence_transformers", "peft"])

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
