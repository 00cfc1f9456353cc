"""What a bundle is: every file that its answers depend on, and stores that know it by its former fingerprint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chromadb
import pytest
from safetensors.torch import load_file, save_file

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.files import SHIPPED
from ctx_compress_rag.decoding.decoder import TransformersDecoder
from ctx_compress_rag.errors import BundleError, FingerprintMismatchError
from ctx_compress_rag.store import SoftContextStore

# What every bundle and store made so far has; computed by the code of then.
DEMO_FORMER = "806ad4f2365bba3aa627d052be855146050e41d3417bd70b5a1b81b6203514fa"
DEMO = "3d83d0f2bb2feefd14e6bd0f152a161de162d5ec4edd9262ccceca377d7e3717"


@pytest.fixture(scope="module")
def demo() -> Bundle:
    return Bundle.from_pretrained("demo", device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED["demo"], tmp_path / "bundle"))


def permute_ids(decoder: Path) -> None:
    path = decoder / "tokenizer.json"
    whole = json.loads(path.read_text())
    vocab = whole["model"]["vocab"]
    a, b = list(vocab)[100:102]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    path.write_text(json.dumps(whole))


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
    "ids": permute_ids,
    "merges": drop_a_merge,
    "template": other_template,
    "rope": setting(rope_parameters={"rope_theta": 500.0, "rope_type": "default"}),
    "norm": setting(rms_norm_eps=0.1),
    "window": setting(use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention"] * 4),
    "ends": setting(eos_token_id=7),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_decoders_files_is_another_bundle(demo: Bundle, folder: Path, edit: str) -> None:
    EDITS[edit](folder / "decoder")
    edited = Bundle.from_pretrained(folder, device="cpu")
    assert edited.fingerprint != demo.fingerprint
    assert edited.former_fingerprint == demo.former_fingerprint
    assert not demo.made(edited.fingerprint)
    with chromadb.EphemeralClient() as client:
        SoftContextStore(client, edited, collection=edit, key=b"k" * 32).add(["A town."], progress=False)
        with pytest.raises(FingerprintMismatchError):
            SoftContextStore(client, demo, collection=edit, key=b"k" * 32)


def test_files_that_say_how_they_were_written_are_the_same_bundle(demo: Bundle, folder: Path) -> None:
    setting(transformers_version="5.0.0", dtype="float16", _name_or_path="/elsewhere")(folder / "decoder")
    path = folder / "decoder" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert Bundle.from_pretrained(folder, device="cpu").fingerprint == demo.fingerprint


def test_a_decoder_in_a_folder_of_its_own_counts(make_tiny_bundle: Callable[..., Any], tmp_path: Path) -> None:
    made = make_tiny_bundle(seed=8)
    made.save_pretrained(tmp_path / "whole")
    decoder = tmp_path / "whole" / "decoder"
    made.config = made.config.model_copy(update={"decoder": str(decoder)})
    made.save_pretrained(tmp_path / "bundle")
    first = Bundle.from_pretrained(tmp_path / "bundle", device="cpu").fingerprint
    assert Bundle.from_pretrained(tmp_path / "bundle", device="cpu").fingerprint == first
    weights = load_file(decoder / "model.safetensors")
    name = min(weights)
    weights[name] = weights[name] + 1
    save_file(weights, decoder / "model.safetensors", metadata={"format": "pt"})
    second = Bundle.from_pretrained(tmp_path / "bundle", device="cpu").fingerprint
    (decoder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    third = Bundle.from_pretrained(tmp_path / "bundle", device="cpu").fingerprint
    assert len({first, second, third}) == 3


# Stores made with the former fingerprint


def test_the_fingerprints_are_what_they_were(demo: Bundle) -> None:
    assert demo.former_fingerprint == DEMO_FORMER
    assert demo.fingerprint == DEMO


def test_a_store_made_with_the_former_fingerprint_opens_and_goes_on(
    demo: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["Kessmar is a harbour town.", "Its ferry leaves at dawn."]
    with monkeypatch.context() as then:
        then.setattr(Bundle, "fingerprint", Bundle.former_fingerprint)
        with SoftContextStore(tmp_path, demo) as old:
            old.add(texts[:1], progress=False)
            marker = old.markers(old.ids(), 4)[0]
    with SoftContextStore(tmp_path, demo) as store:
        assert store.fingerprint == DEMO_FORMER != demo.fingerprint
        report = store.add(texts, progress=False)
        assert (report.added, report.updated, report.unchanged) == (1, 0, 1)
        assert store.markers(store.ensure(texts[:1]), 4) == [marker]
        [soft] = store.fetch([part for part in store.split(marker) if not isinstance(part, str)])
        decoder = TransformersDecoder(demo, store)
        assert decoder.count_tokens(marker) == soft.n_slots


def test_a_bundle_cannot_ask_to_run_code(folder: Path) -> None:
    """`auto_map` names code beside the weights, which transformers would run, or ask at a terminal whether to."""
    decoder = folder / "decoder"
    (decoder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    setting(model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})(decoder)
    with pytest.raises(BundleError, match="trust_remote_code"):
        Bundle.from_pretrained(folder, device="cpu")
    assert not (folder / "ran").exists()
