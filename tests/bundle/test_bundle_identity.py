"""What a bundle is: every file that its answers depend on."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.world import BUNDLE as DEMO
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import BundleError


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
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_bundle_with_an_edited_decoder_is_refused(folder: Path, edit: str) -> None:
    EDITS[edit](folder / "decoder")
    with pytest.raises(BundleError, match="Restore"):
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
