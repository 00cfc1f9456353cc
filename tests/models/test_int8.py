"""Matrices in 8 bits: how near they are, and bundles that are saved with them."""

import torch

from ctx_compress_rag.models.int8 import weights_from_int8, weights_to_int8


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
