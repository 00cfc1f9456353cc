"""Width-wise transmission of ComprExIT: from token anchors to slots (section 3.2.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TransportPlan(nn.Module):
    """The joint plan for all tokens and slots of a segment: entropic optimal transport (eq. 9-11).

    Args:
        dim: width of an anchor.
        transport_dim: width of the space in which anchors and receivers are compared.
        epsilon: weight of the entropy.
        iterations: Sinkhorn iterations.
    """

    def __init__(self, dim: int, transport_dim: int, epsilon: float, iterations: int) -> None:
        super().__init__()
        self.utility = nn.Linear(dim, transport_dim, bias=False)  # W_u
        self.capacity = nn.Linear(dim, 1, bias=False)  # W_rho; a bias would cancel in the softmax
        self.epsilon = epsilon
        self.iterations = iterations

    def forward(self, anchors: Tensor, mask: Tensor, receivers: Tensor, counts: Tensor) -> Tensor:
        """How much of each token goes to each slot; a segment's plan sums to 1.

        Args:
            anchors: token anchors, padded on the right.
            mask: bool, False at padding; no segment is all padding.
            receivers: mean of the anchors of each local field (eq. 8).
            counts: tokens of each field; 0 for fields that a shorter segment lacks.

        Shape: (segments, tokens, dim), (segments, tokens), (segments, slots, dim), (segments, slots)
            -> (segments, tokens, slots)
        """
        senders = F.normalize(self.utility(anchors), dim=-1)
        cosine = senders @ F.normalize(self.utility(receivers), dim=-1).transpose(-1, -2)  # eq. 9
        log_sent = self.capacity(anchors).squeeze(-1).masked_fill(~mask, -torch.inf).log_softmax(-1)  # eq. 10
        return sinkhorn(1 - cosine, log_sent, log_shares(counts, cosine.dtype), self.epsilon, self.iterations)


class WindowAttention(nn.Module):
    """The ablation without coordinated allocation (section 4.3): each slot attends only to its own field.

    The paper says only that it is a window attention that keeps locality. Here a slot's query is its
    receiver, its keys are the anchors of its local field, and each slot's weights are normalized
    separately. Arguments and result of `forward` are those of `TransportPlan`.
    """

    def __init__(self, dim: int, transport_dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, transport_dim, bias=False)
        self.key = nn.Linear(dim, transport_dim, bias=False)

    def forward(self, anchors: Tensor, mask: Tensor, receivers: Tensor, counts: Tensor) -> Tensor:
        keys = self.key(anchors)
        scores = keys @ self.query(receivers).transpose(-1, -2) / keys.shape[-1] ** 0.5
        ends = counts.cumsum(-1).unsqueeze(-2)
        places = torch.arange(anchors.shape[1], device=anchors.device).unsqueeze(-1)
        own = (places < ends) & (places >= ends - counts.unsqueeze(-2))
        # A slot that a segment lacks has no field: with a finite minimum its softmax is not NaN.
        weights = scores.masked_fill(~own, torch.finfo(scores.dtype).min).softmax(-2) * own
        plan: Tensor = weights * log_shares(counts, scores.dtype).exp().unsqueeze(-2)
        return plan


def log_shares(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Log of the receivers' equal capacities 1/K; minus infinity for slots that a segment lacks.

    Shape: (segments, slots) -> (segments, slots)
    """
    there = counts > 0
    shares = -there.sum(-1, keepdim=True).to(dtype).log()
    return shares.expand(counts.shape).masked_fill(~there, -torch.inf)


def sinkhorn(cost: Tensor, log_rows: Tensor, log_columns: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Entropy-regularized optimal transport (eq. 11; Cuturi, 2013), in the log domain.

    Each iteration fits the rows and then the columns, so the columns' marginals are exact up to rounding, and
    the rows' up to convergence. Rows and columns of mass 0 take no part.

    Args:
        cost: cost of moving a unit from row to column.
        log_rows: log of each row's mass, minus infinity at padding.
        log_columns: log of each column's mass, minus infinity at padding.
        epsilon: weight of the entropy; the smaller, the sparser the plan and the slower its convergence.
        iterations: number of iterations.

    Shape: (..., rows, columns), (..., rows), (..., columns) -> (..., rows, columns)
    """
    scores = -cost / epsilon
    by_row, by_column = log_rows, log_columns
    for _ in range(iterations):
        by_row = log_rows - torch.logsumexp(scores + by_column.unsqueeze(-2), dim=-1)
        by_column = log_columns - torch.logsumexp(scores + by_row.unsqueeze(-1), dim=-2)
    return (scores + by_row.unsqueeze(-1) + by_column.unsqueeze(-2)).exp()
