"""The crash laboratory runs, counts, and would count a fault."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.crashes import folders
from ctx_compress_rag.store import SoftContextStore
from helpers.store import WordBundle, passage


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="kills need Linux and a C compiler")
@pytest.mark.parametrize(("part", "count"), [("kills", 20), ("stress", 2), ("files", 10)])
def test_a_little_of_each_part_counts_no_fault(part: str, count: int) -> None:
    command = [sys.executable, "-m", "benchmarks.crashes.commands", part, str(count)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done
    assert "(must be 0)" in done.stdout


@pytest.mark.slow
def test_a_loss_and_a_wrong_passage_are_counted(tmp_path: Path) -> None:
    """In a folder where one kept passage was deleted and another stands for a text it was not made of."""
    folders.make(tmp_path)
    assert +folders.look(tmp_path) == Counter(read=206)

    class Mistaken(WordBundle):
        def compress(self, texts: list[str], ratio: int | None = None) -> list[object]:
            return super().compress([passage(99)] * len(texts), ratio)

    with SoftContextStore(tmp_path, Mistaken(), key=folders.KEY) as store:
        store.delete(["p7", "p8"])
        store.add([folders.text_of(8)], ["p8"], progress=False)
    found = folders.look(tmp_path)
    assert found["missing"] == 1 and found["wrong"] == 1 and found["lost"] == 2
    assert folders.look(tmp_path)["missing"] == 0  # mended by the first look
