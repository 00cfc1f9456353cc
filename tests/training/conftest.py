"""The decoder that tiny recipes train."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from helpers.training import save_decoder


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    return save_decoder(tmp_path_factory.mktemp("decoder"), tiny_tokenizer)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Layers are traced as always when they are compiled, and not made machine code, which takes minutes."""
    counter, compile_with = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, dynamic: compile_with(layer, backend=counter, dynamic=dynamic)
    )
    return counter
