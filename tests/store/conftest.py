"""What the store's tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.key import KEY_VARIABLE
from helpers.store import WordBundle


@pytest.fixture(autouse=True)
def no_key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture
def bundle() -> WordBundle:
    return WordBundle()


@pytest.fixture
def store(tmp_path: Path, bundle: WordBundle) -> Iterator[SoftContextStore]:
    with SoftContextStore(tmp_path / "chroma", bundle) as store:
        yield store
