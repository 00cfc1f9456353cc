"""Pictures and numbers of what a bundle does with a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from benchmarks.__main__ import main
from benchmarks.pictures.allocation import allocation
from benchmarks.pictures.inspect import inspect
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import ConfigError, RatioError
from helpers.comprexit import comprexit_bundle
from helpers.models import widen

TEXT = "Orla Drumwell was born in Pellmouth.\nShe paid $5 or $6 for three books about the northern coast."


@pytest.fixture(scope="module")
def make(tiny_tokenizer: Any) -> Callable[..., Bundle]:
    """Make a ComprExIT bundle of three layers with a window of 64 tokens and segments of 16."""
    return partial(comprexit_bundle, tiny_tokenizer)


def numbers(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "transmission.json").read_text(encoding="utf-8")))


def colors(path: Path) -> int:
    """How many colors a picture has."""
    red, green, blue = (imread(path)[..., i] * 255 for i in range(3))
    return len(np.unique(red * 65536 + green * 256 + blue))


def test_the_command_writes_pictures_and_numbers(
    make: Callable[..., Bundle], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make()
    bundle.save_pretrained(tmp_path / "bundle")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    out = tmp_path / "new" / "out"
    assert (
        main(["inspect", "--bundle", str(tmp_path / "bundle"), str(tmp_path / "text.txt"), "--output", str(out)]) == 0
    )
    names = ["transmission.json", "gates.png", "plan.png", "allocation.png"]
    assert capsys.readouterr().out.splitlines() == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert all(colors(out / name) > 50 for name in names[1:])
    found = numbers(out)
    assert found["fingerprint"] == bundle.fingerprint and found["ratio"] == 4
    assert "".join(found["tokens"]).split() == TEXT.split()


@pytest.mark.parametrize("ratio", [4, 8])
def test_the_numbers_make_the_stored_slots(make: Callable[..., Bundle], tmp_path: Path, ratio: int) -> None:
    """From the gates and the plan that are written, transformers' states and three matrices: eq. 7 and 12."""
    bundle = make()
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


def test_slots_are_compared_as_numpy_does_it() -> None:
    """Random weights over tokens: correlation, spectrum and its entropy; the two ends of the effective rank."""
    rng = np.random.default_rng(0)
    for tokens, slots in ((12, 3), (5, 5), (40, 10)):
        weights = rng.random((tokens, slots))
        rows = (weights / weights.sum(0)).T
        spectrum = np.linalg.svd(rows, compute_uv=False)
        shares = spectrum / spectrum.sum()
        correlation = np.corrcoef(rows)
        found = allocation(torch.tensor(weights))
        np.testing.assert_allclose(found.correlation, correlation, atol=1e-6)
        np.testing.assert_allclose(found.singular_values, shares, atol=1e-6)
        assert found.effective_rank == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
        assert found.overlap == pytest.approx(np.abs(correlation[~np.eye(slots, dtype=bool)]).mean())
    apart = allocation(torch.block_diag(*[torch.ones(4, 1)] * 6))
    same = allocation(torch.rand(9, 1).expand(9, 4))
    assert apart.effective_rank == pytest.approx(6) and same.effective_rank == pytest.approx(1, abs=1e-4)
    assert same.overlap == pytest.approx(1) and allocation(torch.rand(3, 1)).overlap is None


def test_attention_is_that_of_the_decoder_reading_tokens_after_the_text(
    make_tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    """Causal compression tokens are plain ones to transformers; its own weights, on average, and slots as before."""
    frozen = {"mode": "frozen"}
    bundle = make_tiny_bundle(name="compression_tokens", attention="causal", encoder=frozen, decoder=frozen)
    widen(bundle.backbone.model, std=0.3)
    model, [before] = bundle.backbone.model, bundle.compress([TEXT])
    inspect(bundle, [TEXT], tmp_path, 4)
    assert torch.equal(bundle.compress([TEXT])[0].slots, before.slots)
    ids = bundle.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    tokens = bundle.compressor.token.detach().expand(1, before.n_slots, -1)
    embedded = torch.cat([model.get_input_embeddings()(torch.tensor([ids])), tokens], dim=1)
    alone = type(model)._from_config(model.config, attn_implementation="eager")
    alone.load_state_dict(model.state_dict())
    with torch.no_grad():
        layers = alone.eval()(inputs_embeds=embedded, output_attentions=True).attentions
    expected = torch.stack([layer[0, :, -before.n_slots :, : len(ids)] for layer in layers]).mean((0, 1))
    found = torch.tensor(json.loads((tmp_path / "allocation.json").read_text(encoding="utf-8"))["attention"])
    torch.testing.assert_close(found, (expected / expected.sum(1, keepdim=True)).T, atol=1e-5, rtol=1e-4)


def test_what_cannot_be_drawn_is_said(make: Callable[..., Bundle], tiny_bundle: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method 'mean_pooling' has no pictures: give a bundle of .*comprexit"):
        inspect(tiny_bundle, [TEXT], tmp_path)
    with pytest.raises(ConfigError, match="blank"):
        inspect(make(), [TEXT, ""], tmp_path)
    with pytest.raises(RatioError, match="ratio 3 does not divide the encoder's window of 64"):
        inspect(make(), [TEXT], tmp_path, 3)
