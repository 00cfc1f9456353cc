"""How a bundle's decoder is loaded; its lock, its caches, matrices in 8 bits, and sums of vectors."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.fair_lock import FairLock
from ctx_compress_rag.models.int8 import weights_from_int8, weights_to_int8
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.models.transformers_internals import cut_kv_cache, join_kv_caches
from ctx_compress_rag.soft_context import SoftContext, mean_pool_slots
from ctx_compress_rag.store import SoftContextStore
from helpers.decoding import WAIT, wait_for


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


def test_each_waits_for_those_before_it() -> None:
    turns, order, threads = FairLock(), [], []

    def take(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        assert turns.held and not turns.waiting
        for number in range(5):
            thread = threading.Thread(target=take, args=(number,))
            thread.start()
            threads.append(thread)
            wait_for(lambda n=number: turns.waiting > n)
        assert turns.waiting
        with turns:  # reentrant, whoever waits
            assert order == []
    with turns:
        assert order == [0, 1, 2, 3, 4]
    for thread in threads:
        thread.join(WAIT)
    assert not turns.held and not turns.waiting


def test_eight_bits_are_within_half_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        "matrix": torch.randn(64, 128, generator=generator) * torch.logspace(-4, 1, 64).unsqueeze(1),
        "zeros": torch.zeros(64, 64),
        "vector": torch.randn(64, generator=generator),
        "small": torch.randn(3, 4, generator=generator),
    }
    stored = weights_to_int8(state)
    assert stored["matrix"].dtype == torch.int8 and stored["vector"].dtype == stored["small"].dtype == torch.float16
    back = weights_from_int8(stored)
    assert back.keys() == state.keys()
    step = state["matrix"].abs().amax(dim=1, keepdim=True) / 127
    # Half a step, a scale rounded to 11 bits, and the result rounded so, too.
    assert ((back["matrix"] - state["matrix"]).abs() <= step * (0.5 + 127 * 2**-10)).all()
    assert not back["zeros"].any()
    torch.testing.assert_close(back["vector"].float(), state["vector"], atol=1e-3, rtol=1e-3)


def test_a_matrix_that_eight_bits_would_spoil_stays_in_half_precision() -> None:
    """Near the identity, as a reader's map is: a step of the diagonal is more than most other entries."""
    noise = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 0.003
    stored = weights_to_int8({"near": torch.eye(128) + noise, "noise": noise})
    assert {name: value.dtype for name, value in stored.items() if "scale" not in name} == {
        "near": torch.float16,
        "noise": torch.int8,
    }
    back = weights_from_int8(stored)
    assert torch.linalg.norm(back["near"] - torch.eye(128) - noise) < 0.05 * torch.linalg.norm(noise)


def cache_of(rows: int, length: int, heads: int = 2) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        heads_here = heads if layer else 2
        cache.update(torch.rand(rows, heads_here, length, 4), torch.rand(rows, heads_here, length, 4), layer)
    return cache


def tensors(cache: DynamicCache) -> list[torch.Tensor]:
    return [each for layer in cache.layers for each in (layer.keys, layer.values) if each is not None]


def test_a_join_that_fails_half_way_is_undone() -> None:
    cache, unfit = cache_of(2, 3), cache_of(1, 5, heads=3)  # its second layer does not fit
    old = tensors(cache)
    with pytest.raises(RuntimeError):
        join_kv_caches(cache, unfit, 5)
    cut_kv_cache(cache, slice(2), -3)
    assert all(torch.equal(now, one) for now, one in zip(tensors(cache), old, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_do_not_overflow(dtype: torch.dtype) -> None:
    """The mean of numbers that float16 holds is one that it holds, whatever their sum."""
    vectors = 1000 + torch.rand(256, 3)
    pooled, counts = mean_pool_slots(vectors.to(dtype), torch.ones(256, dtype=torch.long), 128)
    assert pooled.dtype == dtype and counts.tolist() == [128, 128]
    expected = vectors.to(dtype).double().unflatten(0, (2, 128)).mean(1)
    torch.testing.assert_close(pooled.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    merged = SoftContext(pooled, counts).merge(2)
    torch.testing.assert_close(merged.slots.double(), expected.mean(0, keepdim=True), rtol=0.01, atol=0)
