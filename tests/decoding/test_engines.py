"""The matrix of all engines: transformers with the reader merged, and a stand-in for vLLM's server."""

from collections.abc import Iterator
from typing import Any

import pytest

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.errors import ConfigError
from helpers.engines import EngineTests
from helpers.serving import listening
from helpers.vllm import KEY, FakeVllm


@pytest.fixture(scope="module")
def here(decoder: Decoder) -> Decoder:
    return decoder


class TestMerged(EngineTests):
    @pytest.fixture(scope="class")
    def there(self, bundle: Any, store: SoftContextStore) -> Decoder:
        return Decoder(bundle, store, merge=True)


class TestVllm(EngineTests):
    cannot = frozenset({"stop", "sampled", "quotation", "json"})  # the stand-in is greedy; vLLM cannot quote

    @pytest.fixture(scope="class")
    def there(self, bundle: Any, store: SoftContextStore) -> Iterator[Decoder]:
        with listening(FakeVllm(bundle).app) as url:
            yield Decoder(bundle, store, engine=url, api_key=KEY)


def test_what_an_engine_does_not_know_is_refused(bundle: Any, make_tiny_bundle: Any) -> None:
    for engine, options, value in (
        ("transfomers", {}, "'transfomers'"),
        ("transformers", {"timeout": 5.0}, "'timeout'"),
        ("http://localhost:1", {"batch_size": 4}, "'batch_size'"),
    ):
        with pytest.raises(ConfigError, match=value):
            Decoder(bundle, engine=engine, **options)
    with pytest.raises(ConfigError, match="merge=True"):
        Decoder(make_tiny_bundle(decoder={"mode": "frozen"}), merge=True)
