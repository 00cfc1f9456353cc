"""Pictures and numbers of what a bundle does with a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.pictures.inspect import inspect
from helpers.comprexit import comprexit_bundle

TEXT = "Orla Drumwell was born in Pellmouth.\nShe paid $5 or $6 for three books about the northern coast."


def numbers(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "transmission.json").read_text(encoding="utf-8")))


def test_the_command_writes_pictures_and_numbers(tiny_tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    bundle = comprexit_bundle(tiny_tokenizer)
    bundle.save_pretrained(tmp_path / "bundle")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    text, out = tmp_path / "text.txt", tmp_path / "new"
    assert main(["inspect", "--bundle", str(tmp_path / "bundle"), str(text), "--output", str(out)]) == 0
    names = ["transmission.json", "gates.png", "plan.png", "allocation.png"]
    assert capsys.readouterr().out.splitlines() == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in names[1:])
    found = numbers(out)
    assert found["fingerprint"] == bundle.fingerprint and found["ratio"] == 4
    assert "".join(found["tokens"]).split() == TEXT.split()


@pytest.mark.parametrize("ratio", [4, 8])
def test_the_numbers_make_the_stored_slots(tiny_tokenizer: Any, tmp_path: Path, ratio: int) -> None:
    """From the gates and the plan that are written, transformers' states and three matrices: eq. 7 and 12."""
    bundle = comprexit_bundle(tiny_tokenizer)
    inspect(bundle, [TEXT], tmp_path, ratio)
    found = numbers(tmp_path)
    gates, plan = torch.tensor(found["gates"]), torch.tensor(found["plan"])
    ids = bundle.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert gates.shape == (len(ids), 3) and plan.shape == (len(ids), -(-len(ids) // ratio))
    torch.testing.assert_close(gates.sum(1), torch.ones(len(ids)))
    torch.testing.assert_close(torch.tensor(found["mean_gates"]), gates.mean(0))
    with torch.no_grad():
        states = bundle.backbone.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[1:]
        sized = [state[0] / state[0].pow(2).mean(-1, keepdim=True).sqrt() for state in states]
        mixed = sum(gates[:, [i]] * state for i, state in enumerate(sized))
        values = mixed @ bundle.compressor.anchor.weight.T @ bundle.compressor.value.weight.T
    slots = []
    for start in range(0, len(ids), 16):
        part = plan[start : start + 16, start // ratio : -(-min(start + 16, len(ids)) // ratio)]
        assert part.sum() == pytest.approx(1, abs=1e-5)
        slots.append(part.shape[1] * part.T @ values[start : start + 16])
    assert plan.sum() == pytest.approx(len(slots), abs=1e-4)  # nothing goes from one segment to another
    [soft] = bundle.compress([TEXT], ratio)
    torch.testing.assert_close(torch.cat(slots), soft.slots, atol=1e-4, rtol=1e-3)
