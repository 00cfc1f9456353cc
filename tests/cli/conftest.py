"""Runs commands, and keeps what they print."""

from pathlib import Path

import pytest

from ctx_compress_rag.cli import main
from helpers.cli import write_docs


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
        [line] = self.err.splitlines()
        return line.removeprefix("ctx-compress: error: ")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture(scope="session")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_docs(tmp_path_factory.mktemp("corpus") / "docs", files=3)
