"""The decoder that tiny recipes train."""

from pathlib import Path
from typing import Any

import pytest

from helpers.training import save_decoder


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    return save_decoder(tmp_path_factory.mktemp("decoder"), tiny_tokenizer)
