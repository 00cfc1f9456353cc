"""Matrices in 8 bits: how near they are, and bundles that are saved with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.models.int8 import from_int8, to_int8


def test_eight_bits_are_within_half_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        "matrix": torch.randn(64, 128, generator=generator) * torch.logspace(-4, 1, 64).unsqueeze(1),
        "zeros": torch.zeros(64, 64),
        "vector": torch.randn(64, generator=generator),
        "small": torch.randn(3, 4, generator=generator),
    }
    stored = to_int8(state)
    assert stored["matrix"].dtype == torch.int8 and stored["vector"].dtype == stored["small"].dtype == torch.float16
    back = from_int8(stored)
    assert back.keys() == state.keys()
    step = state["matrix"].abs().amax(dim=1, keepdim=True) / 127
    # Half a step, a scale rounded to 11 bits, and the result rounded so, too.
    assert ((back["matrix"] - state["matrix"]).abs() <= step * (0.5 + 127 * 2**-10)).all()
    assert not back["zeros"].any()
    torch.testing.assert_close(back["vector"].float(), state["vector"], atol=1e-3, rtol=1e-3)


def test_a_matrix_that_eight_bits_would_spoil_stays_in_half_precision() -> None:
    """Near the identity, as a reader's map is: a step of the diagonal is more than most other entries."""
    noise = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 0.003
    stored = to_int8({"near": torch.eye(128) + noise, "noise": noise})
    assert {name: value.dtype for name, value in stored.items() if "scale" not in name} == {
        "near": torch.float16,
        "noise": torch.int8,
    }
    back = from_int8(stored)
    assert torch.linalg.norm(back["near"] - torch.eye(128) - noise) < 0.05 * torch.linalg.norm(noise)


def test_a_bundle_in_eight_bits_is_smaller_and_near(make_tiny_bundle: Any, tmp_path: Path) -> None:
    """How it is saved again: bundle/test_bundle_adapters.py."""
    bundle = make_tiny_bundle(encoder={"mode": "full"})
    exact = bundle.compress(["A passage of some words."])[0].slots
    bundle.save_pretrained(tmp_path / "half")
    bundle.save_pretrained(tmp_path / "int8", int8=True)
    again = Bundle.from_pretrained(tmp_path / "int8")
    assert again.fingerprint == bundle.fingerprint != Bundle.from_pretrained(tmp_path / "half").fingerprint
    slots = again.compress(["A passage of some words."])[0].slots
    assert torch.linalg.norm(slots - exact) < 0.05 * torch.linalg.norm(exact)
    sizes = [(tmp_path / f / "decoder").glob("model*.safetensors") for f in ("int8", "half")]
    eight, sixteen = (sum(file.stat().st_size for file in files) for files in sizes)
    assert eight < 0.8 * sixteen  # some of its matrices are too small to gain
