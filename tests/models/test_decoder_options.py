"""How a bundle's decoder is loaded: its dtype, place, attention and packing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.store import SoftContextStore


@pytest.fixture(scope="module", params=[False, True], ids=["half", "int8"])
def folder(request: Any, make_tiny_bundle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("options")
    make_tiny_bundle(seed=5).save_pretrained(made, int8=request.param)
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float16", torch.bfloat16, "float32"])
def test_the_dtype_is_the_one_asked_for(folder: Path, dtype: Any) -> None:
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))
    whole, loaded = Bundle.from_pretrained(folder), Bundle.from_pretrained(folder, dtype=dtype)
    assert {p.dtype for p in loaded.backbone.own_state().values()} == {wanted}
    assert loaded.fingerprint == whole.fingerprint
    for name, weight in loaded.backbone.own_state().items():
        assert torch.equal(weight, whole.backbone.own_state()[name].to(wanted))
    [soft] = loaded.compress(["Orla kept bees in Pellmouth."])
    assert torch.isfinite(loaded.embed(soft)).all()
    assert Decoder(loaded).generate(["Who kept bees?"], Sampling(max_tokens=3))[0].completion_tokens


IMPOSSIBLE = {"dtype": ["int8", "half a bit", torch.int32, "nn"], "device": ["nowhere", "meta", "cuda:99"]}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option in IMPOSSIBLE for value in IMPOSSIBLE[option]]
)
def test_impossible_options_are_named(folder: Path, option: str, value: Any) -> None:
    with pytest.raises((ConfigError, BundleError), match=str(value)):
        Bundle.from_pretrained(folder, **{option: value})


def test_a_device_map_places_the_decoder(folder: Path) -> None:
    plain, mapped = Bundle.from_pretrained(folder), Bundle.from_pretrained(folder, device_map="auto")
    assert Decoder(mapped).generate(["Who kept bees?"], Sampling(max_tokens=6)) == Decoder(plain).generate(
        ["Who kept bees?"], Sampling(max_tokens=6)
    )
    with pytest.raises(ConfigError, match="device='cpu' and device_map='auto': give one"):
        Bundle.from_pretrained(folder, device="cpu", device_map="auto")
    nowhere, _ = load_decoder(folder / "decoder", device_map={"": "meta"})
    assert nowhere.device.type == "meta"


def test_packed_weights_answer_from_slots_and_are_not_saved(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    wanted = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    plain, packed = Bundle.from_pretrained(folder), Bundle.from_pretrained(folder, quantization_config=wanted)
    assert "under the same fingerprint" in caplog.text
    assert packed.fingerprint == plain.fingerprint
    ids = torch.tensor([plain.tokenizer("Who kept bees?")["input_ids"]])
    with torch.no_grad(), plain.backbone.use("reader") as whole, packed.backbone.use("reader") as small:
        expected, found = whole(ids).logits, small(ids).logits
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()
    store = SoftContextStore(tmp_path / "chroma", plain)
    store.add(["Orla kept bees in Pellmouth."], ["orla"], progress=False)
    answer = Decoder(packed, store).generate([f"{store.marker('orla', 4)} Who kept bees?"], Sampling(max_tokens=3))
    assert answer[0].slots
    with pytest.raises(ConfigError, match="quantized: load the bundle without"):
        packed.save_pretrained(tmp_path / "saved")
