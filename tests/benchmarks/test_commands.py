"""What a user can mend ends a command of the laboratory with one line and code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.timing.speed import random_bundle
from benchmarks.world import BUNDLE
from ctx_compress_rag.bundle.bundle import Bundle


def test_a_text_that_cannot_be_timed_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("Some text.")
    (tmp_path / "empty.txt").write_text(" \n")
    for args, named in (
        (["time-index", str(tmp_path / "empty.txt")], "empty.txt"),
        (["time-training", str(tmp_path / "missing.txt")], "missing.txt"),
        (["time-index", str(tmp_path / "good.txt"), "--passages", "0"], "--passages"),
        (["time-first-token", str(tmp_path / "good.txt"), "--prompt", "2"], "--prompt 2"),
    ):
        assert main(args) == 2
        assert named in capsys.readouterr().err


def test_the_decoder_that_is_timed_reads_every_token_of_the_bundle() -> None:
    tokenizer = Bundle.from_pretrained(BUNDLE).tokenizer
    assert random_bundle(tokenizer).backbone.embeddings.weight.shape[0] >= len(tokenizer)
