"""Linear self-attention, and weights that make it gradient descent (In-Context Optimization, lemma 1, appendix A)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearAttention:
    """One head of self-attention without softmax or biases (eq. 2).

    Attributes:
        query, key, value, output: W_Q, W_K, W_V and P, each of shape (..., d, d), where d is the width of a token.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    def attend(self, tokens: Tensor, context: Tensor, injected: Tensor | None = None) -> Tensor:
        """Return P V K^T q_j for each of `tokens`, with keys and values from the context's tokens only.

        Without a softmax the product can be computed in any order. This order never computes the context's keys and
        values, so a single query token costs N times less.

        Args:
            tokens: shape (..., n, d).
            context: shape (..., N, d).
            injected: rows appended to both the keys and the values (eq. 22), shape (..., k, d); None appends nothing.

        Returns:
            shape (..., n, d).
        """
        q = tokens @ self.query.mT
        attended = (q @ self.key) @ context.mT @ context @ self.value.mT
        if injected is not None:
            attended = attended + q @ injected.mT @ injected
        return attended @ self.output.mT


def gradient_step_layer(w1: Tensor, w2: Tensor, examples: int, rate: float) -> LinearAttention:
    """Return the layer of lemma 1, whose `attend` is zero except for y, where it is the change of the prediction.

    The change is that of one gradient step. Tokens are concatenations (x1, x2, y). The step starts from W1 and W2,
    descends `rag_loss` over the context, and is the same for the context's tokens and the query's (eq. 9, 10).

    Args:
        w1: shape (..., dy, d1).
        w2: shape (..., dy, d2).
        examples: N, the number of tokens in the context.
        rate: eta.
    """
    batch = torch.broadcast_shapes(w1.shape[:-2], w2.shape[:-2])
    features, outputs = w1.shape[-1] + w2.shape[-1], w1.shape[-2]
    x = torch.eye(features, dtype=w1.dtype, device=w1.device)
    y = torch.eye(outputs, dtype=w1.dtype, device=w1.device)
    residual = torch.cat([part.expand(*batch, -1, -1) for part in (w1, w2, -y)], dim=-1)
    select = torch.block_diag(x, torch.zeros_like(y))
    return LinearAttention(
        query=select,
        key=select,
        value=torch.cat([residual.new_zeros(*batch, features, features + outputs), residual], dim=-2),
        output=torch.block_diag(torch.zeros_like(x), y * (-rate / examples)),
    )


def stack(
    layer: LinearAttention, context: Tensor, queries: Tensor, depth: int, outputs: int, injected: Tensor | None = None
) -> Tensor:
    """Return predictions of `depth` layers with shared weights; with `gradient_step_layer`, of `depth` steps (eq. 7).

    A later step needs the residual of the earlier steps, so in the context y must become y - dW1 x1 - dW2 x2, which is
    lemma 1's update with the opposite sign. All tokens are updated with that sign. The query's y goes in as minus its
    first prediction and comes out as minus its last prediction.

    Args:
        layer: the weights of every layer.
        context: tokens (x1, x2, y), shape (..., N, d).
        queries: tokens (x1, x2, first prediction), shape (..., n, d).
        depth: K.
        outputs: dy, the width of y.
        injected: as for `LinearAttention.attend`, at every layer.

    Returns:
        shape (..., n, dy).
    """
    queries = torch.cat([queries[..., :-outputs], -queries[..., -outputs:]], dim=-1)
    for remaining in range(depth, 0, -1):
        queries = queries - layer.attend(queries, context, injected)
        if remaining > 1:
            context = context - layer.attend(context, context, injected)
    return -queries[..., -outputs:]
