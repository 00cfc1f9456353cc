"""Drafts: what is written beside a target becomes the target, whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from ctx_compress_rag.drafts import draft

KILLED = """
import os, pathlib, sys
from ctx_compress_rag.drafts import draft
with draft(pathlib.Path(sys.argv[1])) as made:
    made.mkdir()
    made.joinpath("half").write_text("half")
    os._exit(9)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    target, own = tmp_path / "deep" / "bun[d]le", tmp_path / "deep" / ".bun[d]le-notes" / "note"
    own.parent.mkdir(parents=True)
    own.write_text("kept")
    assert subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False).returncode == 9
    left = set(target.parent.iterdir())
    assert len(left) == 2 and not target.exists()
    with draft(target) as first:
        assert not left & set(target.parent.iterdir()) - {own.parent}
        with draft(target) as second:  # the first one is in use
            second.write_text("second")
        first.write_text("first")
    assert target.read_text() == "first" and own.read_text() == "kept"
    assert set(target.parent.iterdir()) == {target, own.parent}


def test_a_full_folder_or_an_error_leaves_all_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    with pytest.raises(KeyboardInterrupt), draft(target) as made:
        made.mkdir()
        raise KeyboardInterrupt
    with draft(target) as made:  # an empty folder is replaced
        made.mkdir()
        made.joinpath("file").touch()
    with pytest.raises(OSError, match="bundle"), draft(target) as made:
        made.mkdir()
    assert {*tmp_path.rglob("*")} == {target, target / "file"}
