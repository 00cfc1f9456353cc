"""ComprExIT's width-wise transmission (eq. 9-11): transport against other solvers, and its ablation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.methods.comprexit.transport import sinkhorn


def marginals(generator: torch.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine costs of random vectors near their fields' means, random row masses, equal column masses."""
    anchors = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    receivers = torch.stack([part.mean(0) for part in anchors.chunk(columns)])
    cost = 1 - F.cosine_similarity(anchors.unsqueeze(1), receivers.unsqueeze(0), dim=-1)
    sent = torch.randn(rows, generator=generator, dtype=torch.float64).softmax(0)
    return cost, sent, torch.full((len(receivers),), 1 / len(receivers), dtype=torch.float64)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 40), columns=st.integers(1, 8))
@settings(deadline=None, max_examples=12)
def test_the_plan_is_the_entropic_optimum(seed: int, rows: int, columns: int) -> None:
    """Only the optimum has both marginals and is exp(f_t + g_k - C / epsilon); and no other solver is needed."""
    generator = torch.Generator().manual_seed(seed)
    cost, sent, received = marginals(generator, rows, min(rows, columns))
    plan = sinkhorn(cost, sent.log(), received.log(), 0.5, 600)  # at 0.1 some need thousands
    torch.testing.assert_close(plan.sum(1), sent, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(plan.sum(0), received, atol=1e-12, rtol=1e-12)
    potentials = plan.log() + cost / 0.5
    centered = potentials - potentials.mean(0, keepdim=True) - potentials.mean(1, keepdim=True) + potentials.mean()
    assert centered.abs().max() < 1e-8


@pytest.mark.parametrize("iterations", [1, 30])
def test_rows_and_columns_of_no_mass_take_no_part(iterations: int) -> None:
    """From the first iteration on, so that padding changes nothing before convergence either."""
    cost, sent, received = marginals(torch.Generator().manual_seed(2), 9, 3)
    alone = sinkhorn(cost, sent.log(), received.log(), 0.1, iterations)
    log_sent, log_received = (F.pad(mass.log(), (0, 2), value=-math.inf) for mass in (sent, received))
    beside = sinkhorn(F.pad(cost, (0, 2, 0, 2), value=0.3), log_sent, log_received, 0.1, iterations)
    torch.testing.assert_close(beside, F.pad(alone, (0, 2, 0, 2)), atol=1e-12, rtol=1e-9)
