"""A tiny decoder with a store of passages, and prompts of every kind for it."""

from typing import Any

import pytest

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.bundle.files import TEACHER
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from helpers.decoding import passage_store, prompts_of
from helpers.langchain import talkative_bundle
from helpers.models import draw_lora


@pytest.fixture(scope="package")
def bundle(make_tiny_bundle: Any) -> Bundle:
    """A bundle with a teacher, which reads slots and text together by three quarters as its reader."""
    made = talkative_bundle(make_tiny_bundle)
    made.backbone.add_adapter(TEACHER, lambda: lora_config(TuneConfig(rank=3, alpha=7)))
    draw_lora(made.backbone.model, std=0.3)
    config = made.config.model_copy(update={"reader_share": 0.75})
    return Bundle(config, made.backbone, made.compressor, made.reader)


@pytest.fixture(scope="package")
def store(bundle: Any) -> SoftContextStore:
    return passage_store(bundle, "decoder")


@pytest.fixture(scope="package")
def decoder(bundle: Any, store: SoftContextStore) -> Decoder:
    return Decoder(bundle, store)


@pytest.fixture(scope="package")
def prompts(store: SoftContextStore) -> list[Any]:
    return prompts_of(store)
