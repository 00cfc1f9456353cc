"""Fixtures shared by the tests: tiny real bundles with random weights."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# No test goes beyond this machine, and each HTTP client would read all certificates.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
os.environ["OMP_NUM_THREADS"] = "1"  # of torch and NumPy: those of one process would wait for those of the other
gc.disable()  # what imports make stays: looking through it again and again takes a fifth of their time


def pytest_collectstart() -> None:
    """The process that hands tests to others collects none, and need not import hypothesis."""
    from hypothesis import HealthCheck, settings

    settings.register_profile("quick", max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    settings.load_profile("quick")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 10, 10)


def pytest_runtest_teardown() -> None:
    """Training sets this for its process; hypothesis refuses to draw floats where tiny ones are flushed to zero."""
    import torch

    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer with a chat template."""
    from benchmarks.world.world import tokenizer_texts
    from helpers.architectures import PLAIN, train_tokenizer

    return train_tokenizer(PLAIN, tokenizer_texts(50), 600, prefix_space=True, model_max_length=512)


@pytest.fixture(scope="session")
def make_tiny_bundle(tiny_tokenizer: Any) -> Callable[..., Any]:
    """Make a bundle with random weights; keywords are the method's (by default mean pooling's), and `seed`.

    RAM stores a vector for each segment: its base ratio is their size.
    """
    import torch

    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.models.backbone import Backbone
    from helpers.models import tiny_config, tiny_llama

    def make(seed: int = 0, **method: Any) -> Bundle:
        torch.manual_seed(seed)
        base_ratio = method["segment_tokens"] if method.get("name") == "ram" else 4
        config = tiny_config(method={"name": "mean_pooling", **method}, base_ratio=base_ratio)
        bundle = Bundle.build(config, Backbone(tiny_llama(tiny_tokenizer), tiny_tokenizer))
        bundle.reader.initialize(1.0)
        return bundle

    return make


@pytest.fixture(scope="session")
def tiny_bundle(make_tiny_bundle: Any) -> Any:
    """A bundle with LoRA on both sides."""
    return make_tiny_bundle()


@pytest.fixture(scope="session")
def talkative(make_tiny_bundle: Any) -> Any:
    """A bundle whose decoder answers in text that depends on all of its prompt."""
    from helpers.langchain import talkative_bundle

    return talkative_bundle(make_tiny_bundle)


@pytest.fixture(scope="module")
def bundle_folder(make_tiny_bundle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved bundle, for what opens one by its address."""
    from helpers.cli import save_bundle

    return save_bundle(make_tiny_bundle(), tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def adaptive(bundle_folder: Path) -> Any:
    """The saved bundle's decoder."""
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.decoding.decoder import Decoder

    return Decoder(Bundle.from_pretrained(bundle_folder, device="cpu"))


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that bundles compress, in order; compression itself is as ever."""
    from ctx_compress_rag.bundle.bundle import Bundle

    seen: list[str] = []
    compress = Bundle.compress

    def watched(self: Bundle, texts: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(texts)
        return compress(self, texts, *args, **kwargs)

    monkeypatch.setattr(Bundle, "compress", watched)
    return seen
