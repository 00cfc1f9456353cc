"""Methods of other packages: trained, saved, loaded, stored and asked; found by an entry point."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.methods.base.compressor import SlotBatch, TokenCompressor
from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig
from ctx_compress_rag.methods.base.projections import LinearMap
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.methods.registry import METHODS, Method, register
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.training.run import run_recipe
from helpers.ram import PASSAGES
from helpers.training import save_decoder, write_recipe


class FirstTokensConfig(MethodConfig):
    """Settings of the toy."""

    name: Literal["first_tokens"] = "first_tokens"
    gain: float = 1.0


class FirstTokens(TokenCompressor):
    """Of every so many tokens the first one's embedding, times a gain that is trained."""

    def __init__(self, backbone: Any, config: FirstTokensConfig) -> None:
        super().__init__(backbone)
        self.dim = backbone.dim
        self.gain = nn.Parameter(torch.tensor([config.gain]), requires_grad=False)

    def encode(self, input_ids: Tensor, attention_mask: Tensor, ratios: Sequence[int]) -> dict[int, SlotBatch]:
        embedded = self.gain * self.backbone.embeddings(input_ids)
        counts = {r: torch.stack([m.sum(1) for m in attention_mask.split(r, dim=1)], dim=1) for r in ratios}
        return {r: SlotBatch(embedded[:, ::r] * (counts[r] > 0).unsqueeze(-1), counts[r]) for r in ratios}


@pytest.fixture
def registered() -> Iterator[None]:
    """The toy, known for the time of a test."""
    register(
        Method(
            config=FirstTokensConfig,
            compressor=FirstTokens,
            reader=lambda backbone, config, compressor: Reader(
                backbone, LinearMap(compressor.dim, backbone.dim), TuneConfig(mode="frozen")
            ),
            paper="A toy",
        )
    )
    yield
    del METHODS["first_tokens"]


def recipe(folder: Path, tokenizer: Any) -> Path:
    """A recipe that trains the toy on a tiny decoder, both in `folder`."""
    decoder = save_decoder(folder / "decoder", tokenizer)
    optim = {"steps": 2, "learning_rate": 1e-2, "final_learning_rate": 0.0}
    return write_recipe(decoder, "answer", folder / "run", optim, method={"name": "first_tokens"}, ratios=[4])


def test_a_method_from_outside_is_trained_saved_loaded_stored_and_asked(
    registered: None, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    folder = run_recipe(recipe(tmp_path, tiny_tokenizer)) / "bundle"
    assert "first_tokens (A toy)" in (folder / "README.md").read_text(encoding="utf-8")
    bundle = Bundle.from_pretrained(folder)
    assert isinstance(bundle.config.method, FirstTokensConfig)
    gain = float(bundle.compressor.gain)
    assert gain != 1.0
    [soft] = bundle.compress(PASSAGES[:1])
    ids = bundle.tokenizer(PASSAGES[0], add_special_tokens=False)["input_ids"]
    torch.testing.assert_close(soft.slots, gain * bundle.backbone.embeddings.weight.detach()[ids[::4]])
    store = SoftContextStore(str(tmp_path / "chroma"), bundle)
    decoder = Decoder(bundle, store)
    [answer] = decoder.generate([f"{mark_texts(store, PASSAGES[:1])[0]} Who built the harbour?"])
    assert answer.slots == soft.n_slots and answer.completion_tokens > 0


def test_without_registering_it_is_unknown(tiny_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method.name: 'first_tokens' is unknown: .*'mean_pooling'"):
        run_recipe(recipe(tmp_path, tiny_tokenizer))


# A package of methods, known by its entry point, without an import by the user

_MODULE = """
from typing import Literal
from ctx_compress_rag.methods.base.config import MethodConfig
from ctx_compress_rag.methods.base.method import Method, register

class ToyConfig(MethodConfig):
    name: Literal["toy"] = "toy"
    gain: float = 1.0

register(Method(config=ToyConfig, compressor=None, reader=None, paper="A toy"))
"""
_USER = """
from ctx_compress_rag.bundle.config import BundleConfig
config = BundleConfig(name="b", method={"name": "toy", "gain": 2.5}, base_ratio=4, ratios=[4], max_tokens=64)
print(type(config.method).__name__, config.method.gain)
"""


def test_an_installed_package_of_methods_is_found(tmp_path: Path) -> None:
    done = _run(tmp_path, _MODULE, "-c", _USER)
    assert done.stdout == "ToyConfig 2.5\n", done.stderr


def test_a_package_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """Every command fails then, whichever method it uses."""
    done = _run(
        tmp_path, "import no_such_module", "-m", "ctx_compress_rag.cli", "export", "smollm2-135m", str(tmp_path / "out")
    )
    assert done.returncode == 2
    assert "'toy' of the package toy-methods cannot be loaded (ModuleNotFoundError: No module named" in done.stderr
    assert "Traceback" not in done.stderr


def _run(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where a package with this module is installed in `folder`."""
    (folder / "toy_methods.py").write_text(module)
    about = folder / "toy_methods-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-methods\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[ctx_compress_rag.methods]\ntoy = toy_methods\n")
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
