"""What the store's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctx_compress_rag.stores import SoftContextStore
from helpers.store import WordBundle


@pytest.fixture
def bundle() -> WordBundle:
    return WordBundle()


@pytest.fixture
def store(tmp_path: Path, bundle: WordBundle) -> Iterator[SoftContextStore]:
    with SoftContextStore(tmp_path / "chroma", bundle) as store:
        yield store
