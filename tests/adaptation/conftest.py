"""A decoder to adapt, and its bundle."""

from typing import Any

import pytest

from ctx_compress_rag.decoding.decoder import Decoder
from helpers.models import draw_lora


@pytest.fixture(scope="package")
def bundle(make_tiny_bundle: Any) -> Any:
    """With adapters of its own for compressor and reader that do something."""
    made = make_tiny_bundle(seed=6)
    for name, parameter in made.backbone.model.named_parameters():
        if "lora_" not in name and "proj" in name:
            parameter.mul_(10)  # wide, so that what is attended to matters
    draw_lora(made.backbone.model, 0.1)
    return made


@pytest.fixture(scope="package")
def decoder(bundle: Any) -> Decoder:
    return Decoder(bundle)
