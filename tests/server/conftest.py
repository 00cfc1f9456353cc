"""The index that `ctx-compress serve` is started on, and the app in this process, for two keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import chromadb
import pytest

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.cli import main
from ctx_compress_rag.server.app import create_app
from ctx_compress_rag.server.guard import ApiKeys, ServerLimits
from helpers.cli import save_bundle, write_docs
from helpers.langchain import TEXTS
from helpers.serving import ANNA, BERT, listening


@pytest.fixture(scope="session")
def index(make_tiny_bundle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_bundle(make_tiny_bundle(), folder / "bundle")
    store = folder / "chroma"
    docs = write_docs(folder / "docs", files=1)
    assert main(["index", str(docs), "--index", str(store), "--bundle", str(folder / "bundle")]) == 0
    return store


@pytest.fixture(scope="module")
def store(talkative: Any) -> SoftContextStore:
    made = SoftContextStore(chromadb.EphemeralClient(), talkative, collection=f"served-{uuid4().hex}", key=b"k" * 16)
    made.add(list(TEXTS.values()), progress=False)
    return made


@pytest.fixture(scope="module")
def decoder(talkative: Any, store: SoftContextStore) -> Decoder:
    return Decoder(talkative, store)


@pytest.fixture(scope="module")
def url(decoder: Decoder) -> Iterator[str]:
    app = create_app(decoder, ApiKeys({ANNA: "anna", BERT: "bert"}), ServerLimits(body_bytes=100_000, answer_tokens=12))
    with listening(app) as address:
        yield address
