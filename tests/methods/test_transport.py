"""ComprExIT's width-wise transmission (eq. 9-11): transport against other solvers, and its ablation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.methods.comprexit.config import ComprexitConfig
from ctx_compress_rag.methods.comprexit.transport import TransportPlan, WindowAttention, sinkhorn


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
    plan = sinkhorn(cost, sent.log(), received.log(), 0.1, 600)
    torch.testing.assert_close(plan.sum(1), sent, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(plan.sum(0), received, atol=1e-12, rtol=1e-12)
    potentials = plan.log() + cost / 0.1
    centred = potentials - potentials.mean(0, keepdim=True) - potentials.mean(1, keepdim=True) + potentials.mean()
    assert centred.abs().max() < 1e-8


def test_the_plan_nears_the_linear_programmes() -> None:
    """Without entropy eq. 11 is a linear programme; entropy costs at most epsilon log(tokens x slots)."""
    cost, sent, received = marginals(torch.Generator().manual_seed(4), 24, 6)
    rows, columns = cost.shape
    equal = torch.cat([torch.eye(rows).repeat_interleave(columns, 1), torch.eye(columns).repeat(1, rows)])
    best = linprog(cost.flatten().numpy(), A_eq=equal.numpy(), b_eq=torch.cat([sent, received]).numpy())
    assert best.status == 0
    gaps = []
    for epsilon in (0.2, 0.05, 0.01):
        plan = sinkhorn(cost, sent.log(), received.log(), epsilon, 3000)
        assert (plan.sum(1) - sent).abs().sum() < 1e-3
        gaps.append(float((plan * cost).sum()) - best.fun)
        assert -1e-3 < gaps[-1] <= epsilon * math.log(rows * columns)
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 5e-3


@pytest.mark.parametrize("iterations", [1, 30])
def test_rows_and_columns_of_no_mass_take_no_part(iterations: int) -> None:
    """From the first iteration on, so that padding changes nothing before convergence either."""
    cost, sent, received = marginals(torch.Generator().manual_seed(2), 9, 3)
    alone = sinkhorn(cost, sent.log(), received.log(), 0.1, iterations)
    log_sent, log_received = (F.pad(mass.log(), (0, 2), value=-math.inf) for mass in (sent, received))
    beside = sinkhorn(F.pad(cost, (0, 2, 0, 2), value=0.3), log_sent, log_received, 0.1, iterations)
    torch.testing.assert_close(beside, F.pad(alone, (0, 2, 0, 2)), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_marginals_hold_at_the_defaults(seed: int) -> None:
    """30 iterations in float32 on whole segments of 128 tokens and 32 slots, and on a short one beside them."""
    defaults = ComprexitConfig()
    torch.manual_seed(seed)
    allocation = TransportPlan(64, defaults.transport_dim, defaults.epsilon, defaults.iterations)
    torch.nn.init.normal_(allocation.capacity.weight, std=0.2)
    anchors, mask = torch.randn(2, 128, 64), torch.ones(2, 128, dtype=torch.bool)
    mask[1, 9:] = False
    counts = torch.stack([torch.full((32,), 4), torch.tensor([4, 4, 1] + [0] * 29)])
    receivers = torch.stack([anchors[i].unflatten(0, (32, 4)).mean(1) for i in range(2)])
    receivers[1, 2] = anchors[1, 8]
    with torch.no_grad():
        plan = allocation(anchors, mask, receivers, counts)
        logits = allocation.capacity(anchors).squeeze(-1)
    for i, (tokens, slots, row_error) in enumerate([(128, 32, 0.01), (9, 3, 0.15)]):
        held = plan[i, :tokens, :slots]
        assert (plan[i, tokens:] == 0).all() and (plan[i, :, slots:] == 0).all()
        torch.testing.assert_close(held.sum(0), torch.full((slots,), 1 / slots), atol=1e-6, rtol=1e-4)
        assert (held.sum(1) - logits[i, :tokens].softmax(0)).abs().sum() < row_error


def test_window_attention_is_not_coordinated() -> None:
    """Each slot takes from its own field alone, and what one takes does not depend on the others' fields."""
    torch.manual_seed(0)
    attention = WindowAttention(8, 8)
    anchors, mask, counts = torch.randn(1, 12, 8), torch.ones(1, 12, dtype=torch.bool), torch.full((1, 3), 4)
    changed = anchors.clone()
    changed[:, 8:] += 1

    def plan(x: Tensor) -> Tensor:
        with torch.no_grad():
            made: Tensor = attention(x, mask, x.unflatten(1, (3, 4)).mean(2), counts)
        return made[0]

    own = torch.block_diag(*[torch.ones(4, 1)] * 3).bool()
    assert (plan(anchors)[~own] == 0).all() and (plan(anchors)[own] > 0).all()
    torch.testing.assert_close(plan(anchors)[:, :2], plan(changed)[:, :2])
    transport = TransportPlan(8, 8, 0.1, 30)
    with torch.no_grad():
        one, two = (transport(x, mask, x.unflatten(1, (3, 4)).mean(2), counts)[0] for x in (anchors, changed))
    assert (one[:, :2] - two[:, :2]).abs().max() > 1e-3
