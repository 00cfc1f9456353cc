"""A tiny decoder with a store of passages, and prompts of every kind for it."""

from typing import Any

import chromadb
import pytest

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.store import SoftContextStore
from helpers.decoding import PASSAGES, prompts_of


@pytest.fixture(scope="package")
def bundle(talkative: Any) -> Any:
    return talkative


@pytest.fixture(scope="package")
def store(bundle: Any) -> SoftContextStore:
    made = SoftContextStore(chromadb.EphemeralClient(), bundle, collection="decoder", key=b"k" * 16)
    made.add(list(PASSAGES.values()), list(PASSAGES), progress=False)
    return made


@pytest.fixture(scope="package")
def decoder(bundle: Any, store: SoftContextStore) -> Decoder:
    return Decoder(bundle, store)


@pytest.fixture(scope="package")
def prompts(store: SoftContextStore) -> list[Any]:
    return prompts_of(store)
