"""A bundle's adapters, in half precision or 8 bits, the teacher's too; and every file that its answers depend on."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.world import BUNDLE as DEMO
from ctx_compress_rag.bundle.bundle import Bundle, add_teacher
from ctx_compress_rag.decoding.engines.transformers import merged_model
from ctx_compress_rag.decoding.export import export_for_vllm
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.models.backbone import Backbone
from helpers import architectures
from helpers.models import draw_lora, read_both_ways, tiny_config, tiny_llama

NAMES = ["compressor", "reader", "teacher"]
TUNE = TuneConfig(rank=64, alpha=32)  # wide enough for matrices that are worth 8 bits
PROMPT = torch.arange(20, 50).unsqueeze(0)
TEXT = "Orla Drumwell was born in Pellmouth, where she kept bees."


def decoder(tokenizer: Any) -> Any:
    torch.manual_seed(4)
    return tiny_llama(tokenizer, hidden_size=64, intermediate_size=128)


def save_teacher(tokenizer: Any, folder: Path, **settings: Any) -> Path:
    """An ordinary peft adapter for the same decoder."""
    config = LoraConfig(
        **{"r": 64, "lora_alpha": 32, "target_modules": "all-linear", "init_lora_weights": False} | settings
    )
    get_peft_model(decoder(tokenizer), config).save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.fixture
def made(tiny_tokenizer: Any, tmp_path: Path) -> Bundle:
    """A bundle with three adapters, all of whose weights matter."""
    config = tiny_config(method={"name": "mean_pooling", "encoder": TUNE, "decoder": TUNE})
    teacher = save_teacher(tiny_tokenizer, tmp_path / "taught")
    bundle = Bundle.build(config, Backbone(decoder(tiny_tokenizer), tiny_tokenizer), teacher)
    bundle.reader.initialize(1.0)
    with torch.no_grad():
        for parameter in bundle.compressor.trained_parameters() + bundle.reader.trained_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return bundle


def logits(bundle: Bundle) -> tuple[torch.Tensor, ...]:
    """Of the text's reader and the slots' reader, and a passage's slots."""
    return (*read_both_ways(bundle, PROMPT), torch.from_numpy(bundle.compress([TEXT])[0].slots))


def same(one: Bundle, other: Bundle) -> bool:
    return all(torch.equal(a, b) for a, b in zip(logits(one), logits(other), strict=True))


def test_in_half_precision_all_three_are_ordinary_peft_adapters(made: Bundle, tmp_path: Path) -> None:
    made.save_pretrained(tmp_path / "int8", int8=True)
    loaded = Bundle.from_pretrained(tmp_path / "int8", device="cpu")
    loaded.save_pretrained(tmp_path / "half")
    assert same(loaded, made)
    for name in NAMES:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "half" / "decoder", dtype=torch.float32).eval()
        tuned = PeftModel.from_pretrained(plain, tmp_path / "half" / name).eval()
        with torch.no_grad(), loaded.backbone.use(name) as model:
            expected = model(input_ids=PROMPT).logits
            torch.testing.assert_close(tuned(input_ids=PROMPT).logits, expected, atol=1e-4, rtol=1e-4)
            with tuned.disable_adapter():
                assert (tuned(input_ids=PROMPT).logits - expected).abs().max() > 0.1


def test_experts_are_adapted_saved_and_loaded(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Only by name. peft wraps the experts of a layer twice, once for each of their two matrices."""
    torch.manual_seed(4)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    sizes = {"vocab_size": len(tiny_tokenizer), "head_dim": 16, "tie_word_embeddings": True}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, **sizes)).eval()
    tune = {"target_modules": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
    method = {"name": "mean_pooling", "encoder": {}, "decoder": tune}
    made = Bundle.build(tiny_config(method=method), Backbone(model, tiny_tokenizer))
    draw_lora(model, std=0.1)
    made.save_pretrained(tmp_path)
    assert any("experts" in name for name in load_file(tmp_path / "reader" / "adapter_model.safetensors"))
    assert same(Bundle.from_pretrained(tmp_path, device="cpu"), made)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder", dtype=torch.float32).eval()
    tuned = PeftModel.from_pretrained(plain, tmp_path / "reader").eval()
    with torch.no_grad():
        for reader in (tuned, merged_model(made)):
            torch.testing.assert_close(reader(input_ids=PROMPT).logits, logits(made)[1], atol=1e-4, rtol=1e-4)
    names = " ".join(made.backbone.adapter_state("compressor"))
    assert "q_proj" in names and "experts" not in names and "gate" not in names
    with pytest.raises(ConfigError, match="experts"):
        export_for_vllm(made, tmp_path / "vllm")


def test_each_form_replaces_what_is_in_the_folder(made: Bundle, make_tiny_bundle: Any, tmp_path: Path) -> None:
    """In half precision, the teacher as given; in 8 bits, half as large, which peft must not read; without teacher."""
    folder, plain, sizes = tmp_path / "bundle", make_tiny_bundle(), {}
    made.save_pretrained(folder)
    given, kept = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "taught", folder / "teacher"))
    assert kept.keys() == given.keys() and all(torch.equal(kept[name], given[name]) for name in given)
    for int8 in (True, False, True):
        made.save_pretrained(folder, int8=int8)
        files = [file for name in NAMES for file in (folder / name).glob("adapter_model*")]
        assert [file.name for file in files] == [f"adapter_model.{'int8.' if int8 else ''}safetensors"] * len(NAMES)
        sizes[int8] = sum(file.stat().st_size for file in files)
        loaded = Bundle.from_pretrained(folder, device="cpu")
        assert same(loaded, made) and loaded.fingerprint == made.fingerprint
    assert sizes[True] < 0.62 * sizes[False]
    plain.save_pretrained(folder)
    assert same(Bundle.from_pretrained(folder, device="cpu"), plain)


def test_a_teacher_that_is_no_bundles_is_left_alone(make_tiny_bundle: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """As in a folder of training outputs; loading would take it for the bundle's own."""
    file = save_teacher(tiny_tokenizer, tmp_path / "teacher") / "adapter_model.safetensors"
    with pytest.raises(ConfigError, match="would be read as this bundle's teacher"):
        make_tiny_bundle().save_pretrained(tmp_path)
    assert file.exists() and not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("modules", [["q_proj"], ["o_proj", "q_proj"]])  # Phi-3 has no q_proj
def test_a_teacher_of_another_architecture_is_named(tiny_tokenizer: Any, tmp_path: Path, modules: list[str]) -> None:
    teacher = save_teacher(tiny_tokenizer, tmp_path / "taught", target_modules=modules)
    other = Backbone(architectures.model("Phi3"), architectures.tokenizer("Phi3"))
    said = f"the teacher '{teacher}' does not fit the decoder, a Phi3ForCausalLM .*q_proj"
    with pytest.raises(BundleError, match=said):
        add_teacher(other, teacher)


@pytest.mark.parametrize("change", [{"peft_type": "NONE"}, {"lora_alpha": "x"}, {"init_lora_weights": "pissa"}])
def test_a_teacher_with_settings_that_peft_cannot_use_is_named(
    tiny_tokenizer: Any, tmp_path: Path, change: dict[str, str]
) -> None:
    path = save_teacher(tiny_tokenizer, tmp_path / "taught") / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    own = Backbone(decoder(tiny_tokenizer), tiny_tokenizer)
    with pytest.raises(BundleError, match=f"the teacher '{path.parent}' does not fit the decoder"):
        add_teacher(own, path.parent)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "bundle"))


def drop_a_merge(decoder: Path) -> None:
    path = decoder / "tokenizer.json"
    whole = json.loads(path.read_text())
    del whole["model"]["merges"][50]
    path.write_text(json.dumps(whole))


def other_template(decoder: Path) -> None:
    path = decoder / "chat_template.jinja"
    path.write_text(path.read_text().replace("message['content']", "'Lie. ' + message['content']"))


def setting(**changes: Any) -> Callable[[Path], None]:
    def change(decoder: Path) -> None:
        path = decoder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


EDITS = {
    "merges": drop_a_merge,
    "template": other_template,
    "rope": setting(rope_parameters={"rope_theta": 500.0, "rope_type": "default"}),
    "norm": setting(rms_norm_eps=0.1),
    "ends": setting(eos_token_id=7),
    "width": setting(hidden_size=2**40),  # found before anything is made in that size
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_bundle_with_an_edited_decoder_is_refused(folder: Path, edit: str) -> None:
    EDITS[edit](folder / "decoder")
    with pytest.raises(BundleError, match="decoder changed .*: restore its files"):
        Bundle.from_pretrained(folder, device="cpu")


def test_files_that_say_how_they_were_written_are_the_same_bundle(folder: Path) -> None:
    setting(transformers_version="5.0.0", dtype="float16", _name_or_path="/elsewhere")(folder / "decoder")
    path = folder / "decoder" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    fingerprints = {Bundle.from_pretrained(each, device="cpu").fingerprint for each in (DEMO, folder)}
    assert len(fingerprints) == 1


def test_an_edited_decoder_in_a_folder_of_its_own_is_refused(make_tiny_bundle: Any, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(seed=8)
    bundle.save_pretrained(tmp_path / "whole")
    decoder = tmp_path / "whole" / "decoder"
    bundle.config = bundle.config.model_copy(update={"decoder": str(decoder)})
    bundle.save_pretrained(tmp_path / "bundle")
    assert Bundle.from_pretrained(tmp_path / "bundle", device="cpu").fingerprint == bundle.fingerprint
    template = (decoder / "chat_template.jinja").read_text()
    (decoder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(BundleError, match=re.escape(str(decoder))):
        Bundle.from_pretrained(tmp_path / "bundle", device="cpu")
    (decoder / "chat_template.jinja").write_text(template)
    weights = load_file(decoder / "model.safetensors")
    name = min(weights)
    weights[name] = weights[name] + 1
    save_file(weights, decoder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BundleError, match=re.escape(str(decoder))):
        Bundle.from_pretrained(tmp_path / "bundle", device="cpu")


def test_a_bundle_cannot_ask_to_run_code(folder: Path) -> None:
    """`auto_map` names code beside the weights, which transformers would run, or ask at a terminal whether to."""
    decoder = folder / "decoder"
    (decoder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    setting(model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})(decoder)
    with pytest.raises(BundleError, match="trust_remote_code"):
        Bundle.from_pretrained(folder, device="cpu")
    assert not (folder / "ran").exists()
