"""A tiny decoder whose text and soft decoding differ, with a store of passages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chromadb
import pytest
import torch

from ctx_compress_rag.decoding.decoder import TransformersDecoder
from ctx_compress_rag.store import SoftContextStore
from helpers.decoding import PASSAGES, QUESTION
from helpers.models import widen


@pytest.fixture(scope="package")
def bundle(make_tiny_bundle: Callable[..., Any]) -> Any:
    """Adapters and weights drawn wide: text and soft decoding differ, and so do answers."""
    made = make_tiny_bundle(seed=3)
    widen(made.backbone.model, seed=4)
    with torch.no_grad():  # embeddings and head are tied: no text ends before its budget
        made.backbone.embeddings.weight[made.tokenizer.eos_token_id] = 0
    made.reader.initialize(1.0)
    return made


@pytest.fixture(scope="package")
def store(bundle: Any) -> SoftContextStore:
    made = SoftContextStore(chromadb.EphemeralClient(), bundle, collection="decoder", key=b"k" * 16)
    made.add(list(PASSAGES.values()), list(PASSAGES), progress=False)
    return made


@pytest.fixture(scope="package")
def decoder(bundle: Any, store: SoftContextStore) -> TransformersDecoder:
    return TransformersDecoder(bundle, store, batch_size=3)


@pytest.fixture(scope="package")
def prompts(store: SoftContextStore) -> list[Any]:
    """With one passage, three, none; neighbors without text between them; raw and chat; several ratios."""
    a, b, c = store.markers(["a", "b", "c"], ratio=4)
    return [
        [{"role": "user", "content": f"{a}\n\nQuestion: {QUESTION}"}],
        [{"role": "user", "content": QUESTION}],
        f"{a}{b}{store.marker('c', ratio=16)} {QUESTION}",
        [{"role": "system", "content": f"Use this: {c}"}, {"role": "user", "content": QUESTION}],
        "Who kept bees?",
        b,
    ]
