"""The index that `ctx-compress serve` is started on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctx_compress_rag.cli import main
from helpers.cli import save_bundle, write_docs


@pytest.fixture(scope="session")
def index(make_tiny_bundle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_bundle(make_tiny_bundle(), folder / "bundle")
    store = folder / "chroma"
    docs = write_docs(folder / "docs", files=1)
    assert main(["index", str(docs), "--store", str(store), "--bundle", str(folder / "bundle")]) == 0
    return store
