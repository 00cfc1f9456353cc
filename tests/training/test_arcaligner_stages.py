"""ArcAligner's stages (section 3.5, tables 3, 5 and 6): what each trains, recipes, ablations."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.card import model_card
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.training.run import run_recipe
from helpers.arcaligner import LORA, make_reader, prompts, read
from helpers.sentences import DIM, save_encoder
from helpers.training import report, write_recipe


def test_ablations() -> None:
    """Without recursion: loops 0 over the same weights. Without gate: all loops for each slot. Without LoRA."""
    full = make_reader()
    batch = prompts(full)
    state = full.saved_state()
    once, always = make_reader(loops=0), make_reader(gate="open")
    for reader in (once, always):
        reader.load_saved_state(state)
    shut = make_reader()
    shut.load_saved_state(state | {n: p - 1e4 for n, p in state.items() if n.endswith(".2.bias")})
    assert torch.equal(read(once, batch).logits, read(shut, batch).logits)
    read(always, batch)
    always.trained_parameters()
    assert not any(p.requires_grad for p in always.gates.parameters())
    assert [(record[batch.slot_mask] == 3).all() for record in always.last_loops.values()] == [True, True]
    none = make_reader(lora=None, loops=0)
    with torch.no_grad():
        assert torch.equal(read(none, batch).logits, none.backbone.model(**batch.model_inputs()).logits)
    assert {name.split(".")[0] for name in none.saved_state()} == {"projection", "gates"}
    with pytest.raises(BundleError, match="reader"):
        none.load_saved_state(state)


def test_dropout_is_for_training_only() -> None:
    reader = make_reader(lora=LORA | {"dropout": 0.5}, loops=0)
    batch = prompts(reader)
    evaluated = read(reader, batch).logits
    reader.train()
    assert torch.equal(read(reader, batch).logits, evaluated)  # no gradients asked for
    with reader.decoder(batch.slot_mask) as model:
        assert not torch.equal(model(**batch.model_inputs()).logits, evaluated)


def test_impossible_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"\[1, 2\].*0 to 1"):
        make_reader(gated_layers=[2, 1])


@pytest.fixture(scope="module")
def stages(decoder: Path, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the three stages have been run, three steps each."""
    folder = tmp_path_factory.mktemp("stages")
    encoder = save_encoder(folder / "encoder", tiny_tokenizer)
    names = ("Orla", "Ada", "Bo", "Cy")
    write_jsonl(
        folder / "data.jsonl",
        [Example((f"{n} keeps a goat. {n} is old.",), (Turn(f"What does {n} keep?", ("a goat",)),)) for n in names],
    )
    optim = {"steps": 3, "learning_rate": 0.02, "final_learning_rate": 0.0, "schedule": "linear"}
    data = {"files": [str(folder / "data.jsonl")], "max_context_tokens": 64}
    method = {"name": "arcaligner", "encoder": str(encoder), "encoder_dim": DIM, "loops": 0, "gate_width": 4}
    method["lora"] = {"rank": 4, "alpha": 4}
    for name, stage, changes in (
        ("1", "reconstruction", {"method": method}),
        ("2", "answer", {"decoder": None, "bundle": str(folder / "1" / "bundle"), "method": None}),
        ("3", "answer", {"decoder": None, "bundle": str(folder / "2" / "bundle"), "method": method | {"loops": 2}}),
    ):
        common = {"base_ratio": 8, "ratios": [8], "data": data}
        run_recipe(write_recipe(decoder, stage, folder / name, optim, **common, **changes))
    return folder


def test_stages_go_on_from_each_other(stages: Path) -> None:
    """Projector and LoRA change in every stage, gates in the third alone, the decoder never."""
    bundles = [Bundle.from_pretrained(stages / stage / "bundle") for stage in "123"]
    states = [bundle.reader.saved_state() for bundle in bundles]
    parts = ({"projection", "lora"}, {"projection", "lora", "gates"})
    for (earlier, later), changing in zip(pairwise(states), parts, strict=True):
        assert earlier.keys() == later.keys()
        changed = {name.split(".")[0] for name in later if not torch.equal(later[name], earlier[name])}
        assert changed == changing
    first, *others = [bundle.backbone.own_state() for bundle in bundles]
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())
    counts = [report(stages / stage)["trained_parameters"] for stage in "123"]
    assert counts[0] == counts[1] < counts[2]
    gates = sum(p.numel() for p in bundles[2].reader.gates.parameters())
    assert counts[2] - counts[1] == gates


def test_a_card_names_the_data_of_all_stages_once(stages: Path) -> None:
    first, second = {"data": "novels", "license": "none"}, {"data": "questions", "license": "MIT"}
    told = {"recipe": {"sources": [second, first]}, "earlier": {"recipe": {"sources": [first]}}}
    card = model_card(Bundle.from_pretrained(stages / "1" / "bundle").config, told, "f")
    assert "| data | license |\n|---|---|\n| novels | none |\n| questions | MIT |\n\n## Limits" in card


def test_a_report_keeps_those_of_the_stages_before(stages: Path) -> None:
    last = Bundle.from_pretrained(stages / "3" / "bundle").report
    told = [last, last["earlier"], last["earlier"]["earlier"]]
    assert [each["recipe"]["output"] for each in told] == [str(stages / stage) for stage in "321"]
    assert "earlier" not in told[-1]
    assert "| Training steps | 9, in stages of 3, 3 and 3 |" in (stages / "3" / "bundle" / "README.md").read_text()
    assert "| Training steps | 3 |" in (stages / "1" / "bundle" / "README.md").read_text()
