"""Synthetic regression tasks with documents, for both retrieval interfaces (In-Context Optimization, appendix C.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

from linear_rag.model import dot_product_weight, predict

DOCUMENT_RANGE = 0.5


class Interface(Protocol):
    """A source of tasks: `Projection`, `DotProduct` or `tabular.TabularTasks`."""

    def sample(self, count: int, generator: Generator) -> LinearTasks:
        """Draw `count` tasks."""


@dataclass(frozen=True)
class LinearTasks:
    """A batch of B tasks, each a context of N examples and one test query. Targets are scalars.

    Attributes:
        context: tokens (x1, x2, y), shape (B, N, d).
        x: the queries' inputs, shape (B, n_I).
        retrieved: the queries' x2, shape (B, d2); None if it is x itself (dot-product interface).
        target: the queries' y, shape (B,).
        w2: where gradient descent starts W2 (W1 starts at zero), shape (1, d2) or (B, 1, d2).
        injected: the documents' row in keys and values (eq. 22), shape (B, 1, d); None for projection.
    """

    context: Tensor
    x: Tensor
    retrieved: Tensor | None
    target: Tensor
    w2: Tensor
    injected: Tensor | None

    def queries(self, x: Tensor, first: Tensor) -> Tensor:
        """Return query tokens (x, x2, first), one per task.

        Shape: (B, n_I), (B,) -> (B, 1, d)
        """
        retrieved = x if self.retrieved is None else self.retrieved
        return torch.cat([x, retrieved, first.unsqueeze(-1)], dim=-1).unsqueeze(1)

    def first_prediction(self, x: Tensor) -> Tensor:
        """Return W1 x1 + W2 x2 where gradient descent starts.

        Shape: (B, n_I) -> (B,)
        """
        retrieved = x if self.retrieved is None else self.retrieved
        return (self.w2 @ retrieved.unsqueeze(-1)).flatten()


Predictor = Callable[[LinearTasks, Tensor], Tensor]
"""Predictions for queries with inputs x: (tasks, (B, n_I)) -> (B,)."""


@dataclass(frozen=True)
class Projection:
    """A source of tasks of the projection-based interface, whose x2 is the example's k documents, concatenated.

    Attributes:
        documents: k.
        width: the width of a document. The paper does not give it; with 2, training on 25 documents takes seconds.
        inputs: n_I, the width of x1.
        examples: N.
    """

    documents: int
    width: int = 2
    inputs: int = 10
    examples: int = 10

    def variances(self) -> Tensor:
        """Return the variances of x1 and x2, concatenated, shape (n_I + k width,)."""
        return torch.cat([torch.ones(self.inputs), DOCUMENT_RANGE**2 * torch.ones(self.documents * self.width)]) / 3

    def sample(self, count: int, generator: Generator, alpha: float = 1.0) -> LinearTasks:
        """Draw tasks: x1 uniform on (-alpha, alpha), documents on (-1/2, 1/2), the teacher's weights normal."""
        x1 = _uniform((count, self.examples + 1, self.inputs), alpha, generator)
        x2 = _uniform((count, self.examples + 1, self.documents * self.width), DOCUMENT_RANGE, generator)
        y = _teacher(x1, x2, generator)
        return LinearTasks(
            context=torch.cat([x1, x2, y], dim=-1)[:, :-1],
            x=x1[:, -1],
            retrieved=x2[:, -1],
            target=y[:, -1, 0],
            w2=torch.zeros(1, x2.shape[-1]),
            injected=None,
        )


class DotProduct:
    """A source of tasks of the dot-product interface: x2 = x1, and W2 = W_z (sum_i d_i d_i^T) M^T holds the documents.

    Each task has its own documents, which do not affect its targets. The injected row h_d holds W2 where tokens hold
    x1, so that its product with a query x is W2 x. W_z and M are drawn once.

    Args:
        documents: k.
        generator: draws W_z and M.
        sigma: the standard deviation of their entries. The paper does not give it; W2 grows with its square.
        inputs: n_I, the width of x1 and of a document.
        examples: N.
    """

    def __init__(
        self, documents: int, generator: Generator, sigma: float = 0.1, inputs: int = 10, examples: int = 10
    ) -> None:
        self.documents, self.inputs, self.examples = documents, inputs, examples
        self.w_z = sigma * torch.randn(1, inputs, generator=generator)
        self.similarity = sigma * torch.randn(inputs, inputs, generator=generator)

    def sample(self, count: int, generator: Generator, alpha: float = 1.0) -> LinearTasks:
        """Draw tasks: x uniform on (-alpha, alpha), documents on (-1/2, 1/2), the teacher's weights normal."""
        x = _uniform((count, self.examples + 1, self.inputs), alpha, generator)
        y = _teacher(x, x, generator)
        documents = _uniform((count, self.documents, self.inputs), DOCUMENT_RANGE, generator)
        return dot_product_tasks(x, y, documents, self.w_z, self.similarity)


def dot_product_tasks(x: Tensor, y: Tensor, documents: Tensor, w_z: Tensor, similarity: Tensor) -> LinearTasks:
    """Return tasks of the dot-product interface; the last row of each task is its query.

    Args:
        x: shape (B, N + 1, n_I).
        y: shape (B, N + 1, 1).
        documents: shape (B, k, n_I).
        w_z: shape (1, n_I).
        similarity: M, shape (n_I, n_I).
    """
    w2 = dot_product_weight(w_z, documents, similarity)
    return LinearTasks(
        context=torch.cat([x, x, y], dim=-1)[:, :-1],
        x=x[:, -1],
        retrieved=None,
        target=y[:, -1, 0],
        w2=w2,
        injected=torch.cat([w2, torch.zeros_like(x[:, :1]), torch.zeros_like(y[:, :1])], dim=-1),
    )


def _uniform(shape: tuple[int, ...], bound: float, generator: Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=generator) - 1) * bound


def _teacher(x1: Tensor, x2: Tensor, generator: Generator) -> Tensor:
    w1 = torch.randn(x1.shape[0], 1, x1.shape[-1], generator=generator)
    w2 = torch.randn(x2.shape[0], 1, x2.shape[-1], generator=generator)
    return predict(w1, w2, x1, x2)
