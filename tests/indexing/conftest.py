"""An index of a tiny bundle."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctx_compress_rag.indexing.index import PassageIndex, open_index


@pytest.fixture
def index(tmp_path: Path, bundle_folder: Path) -> Iterator[PassageIndex]:
    with open_index(tmp_path / "chroma", str(bundle_folder), create=True) as index:
        yield index
