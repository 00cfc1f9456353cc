"""The campaign's parts run, count, and would count a fault."""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from campaign import folders, records
from campaign.run import main
from ctx_compress_rag.store import SoftContextStore
from helpers.store import WordBundle, passage

needs_linux = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="kills are Linux's, and need a C compiler"
)


@pytest.mark.slow
@needs_linux
def test_a_minute_of_it(tmp_path: Path) -> None:
    assert main(["--minutes", "1", "--page", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| kills at chosen calls | 0 |" not in page and page.count("## ") == 6


def test_a_loss_and_a_wrong_passage_are_counted(tmp_path: Path) -> None:
    """In a folder where one kept passage was deleted and another stands for a text it was not made of."""
    folders.make(tmp_path)
    assert folders.look(tmp_path) == Counter(read=20)

    class Mistaken(WordBundle):
        def compress(self, texts: list[str], ratio: int | None = None) -> list[object]:
            return super().compress([passage(99)] * len(texts), ratio)

    with SoftContextStore(tmp_path, Mistaken(), key=folders.KEY) as store:
        store.delete(["p7", "p8"])
        store.add([folders.text_of(8)], ["p8"], progress=False)
    found = folders.look(tmp_path)
    assert found["missing"] == 1 and found["wrong"] == 1 and found["lost"] == 2
    assert folders.look(tmp_path)["missing"] == 0  # mended by the first look


def test_changes_of_records_are_other_values() -> None:
    rng = random.Random(0)
    assert {type(records.changed(5, 6, rng)) for _ in range(100)} == {int, str, float, bool}
    assert len({repr(records.changed("abc", "def", rng)) for _ in range(100)}) > 10
