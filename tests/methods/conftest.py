"""Tiny bundles of every method."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctx_compress_rag.bundle.bundle import Bundle
from helpers.methods import MATRIX, PASSAGES, save_encoder, trained


@pytest.fixture(scope="module")
def encoder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("sentences"), tiny_tokenizer)


@pytest.fixture(scope="module")
def make(make_tiny_bundle: Any, encoder: Path) -> Callable[[str, str], Bundle]:
    """A bundle of a method in one of its forms, whose every weight matters: none is what it was initialized to."""

    def made(name: str, form: str, seed: int = 1) -> Bundle:
        settings = MATRIX[name][form]
        if "encoder_dim" in settings:
            settings = settings | {"encoder": str(encoder)}
        bundle: Bundle = make_tiny_bundle(seed=seed, name=name, **settings)
        with torch.no_grad():
            for weight_name, weight in bundle.backbone.own_state().items():
                if ".layers." in weight_name and weight.ndim == 2:
                    weight.mul_(15)
            slots = np.concatenate([soft.slots for soft in bundle.compress(PASSAGES)])
            bundle.reader.initialize(float(np.sqrt((slots**2).mean())))
            for parameter in trained(bundle):
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.02))
        return bundle

    return made
