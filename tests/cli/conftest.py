"""Runs commands, and keeps what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctx_compress_rag.cli import main
from helpers.cli import save_bundle, write_docs

TESTS = Path(__file__).parents[1]


class Run:
    """Runs a command in this process and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object) -> int:
        self._capsys.readouterr()
        code = main([str(arg) for arg in args])
        self.out, self.err = self._capsys.readouterr()
        return code

    def fails(self, *args: object) -> str:
        """The one line of a command that must end with code 2 and say nothing else."""
        assert self(*args) == 2
        assert self.out == ""
        [line] = [line for line in self.err.splitlines() if not line.startswith("note: ")]
        return line.removeprefix("ctx-compress: error: ")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python in a process of its own, perhaps under another command."""

    def run_python(*args: object, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent)]))
        command = [*under, sys.executable, *map(str, args)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)

    return run_python


@pytest.fixture(scope="session")
def bundle_folder(make_tiny_bundle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = make_tiny_bundle()
    bundle.config = bundle.config.model_copy(update={"reads": "letters from the moon"})
    return save_bundle(bundle, tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="session")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_docs(tmp_path_factory.mktemp("corpus") / "docs", files=3)
