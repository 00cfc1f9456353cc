"""What a user can mend ends a command of the laboratory with one line and code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main


def test_bench_names_a_text_that_it_cannot_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def fails(*args: object) -> str:
        assert main([str(arg) for arg in args]) == 2
        return capsys.readouterr().err

    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    for file, message in (
        ("empty.txt", "holds no text"),
        ("binary.txt", "can't decode byte 0x80"),
        ("missing.txt", "No such file"),
        (".", "Is a directory"),
    ):
        said = fails("bench", tmp_path / file)
        assert message in said and str(tmp_path / file) in said
    (tmp_path / "good.txt").write_text("Some text.")
    assert "0 passages" in fails("bench", tmp_path / "good.txt", "--passages", 0)
    assert "0 tokens are too short" in fails("bench", tmp_path / "good.txt", "--tokens", 0)
    for several in (("--prompt", 2, "--training"), ("--concurrency", 2, "--prompt", 2)):
        assert "give one of them" in fails("bench", tmp_path / "good.txt", *several)
    assert "add --prompt" in fails("bench", tmp_path / "good.txt", "--server", "http://localhost:1")
