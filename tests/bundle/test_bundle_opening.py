"""A bundle opens without its decoder's weights, which are loaded when something needs them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import BundleError
from ctx_compress_rag.store import SoftContextStore

TEXT = "Orla kept bees in Pellmouth."


@pytest.fixture
def folder(make_tiny_bundle: Any, tmp_path: Path) -> Path:
    make_tiny_bundle(seed=3).save_pretrained(tmp_path / "bundle")
    return tmp_path / "bundle"


def test_what_needs_no_weights_loads_none(folder: Path, tmp_path: Path) -> None:
    whole, opened = Bundle.from_pretrained(folder, device="cpu"), Bundle.from_pretrained(folder, device="cpu")
    with SoftContextStore(tmp_path / "chroma", whole) as store:
        store.add([TEXT], ["bees"], progress=False)
    assert whole.backbone.loaded
    with SoftContextStore(tmp_path / "chroma", opened) as store:
        [soft] = store.get(["bees"])
        assert store.marker("bees", 8) and opened.can_read(16) and opened.positions(3) == 3
    assert soft is not None and torch.equal(opened.embed(soft), whole.embed(soft))
    for name in ("dim", "window", "device", "dtype", "commit", "adapters"):
        assert getattr(opened.backbone, name) == getattr(whole.backbone, name)
    assert opened.backbone.generation_config.eos_token_id == whole.backbone.model.generation_config.eos_token_id
    assert opened.fingerprint == whole.fingerprint and not opened.backbone.loaded


def test_weights_loaded_while_compressing_can_be_trained(folder: Path) -> None:
    bundle = Bundle.from_pretrained(folder, device="cpu")
    bundle.compress([TEXT])
    parameters = bundle.backbone.train_adapter("reader")
    with bundle.backbone.use("reader") as model:
        model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)


def test_weights_that_changed_since_the_opening_are_refused(folder: Path) -> None:
    bundle = Bundle.from_pretrained(folder, device="cpu")
    file = folder / "reader" / "adapter_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    with pytest.raises(BundleError, match="changed after the bundle was opened"):
        bundle.compress([TEXT])


def test_it_can_be_saved_to_where_it_lies(folder: Path) -> None:
    bundle = Bundle.from_pretrained(folder, device="cpu")
    before = bundle.fingerprint
    bundle.save_pretrained(folder)
    assert Bundle.from_pretrained(folder, device="cpu").fingerprint == bundle.fingerprint == before
