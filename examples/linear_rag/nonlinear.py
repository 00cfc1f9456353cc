"""Layers of attention after an MLP (In-Context Optimization, section 4.3)."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from linear_rag.tasks import LinearTasks, Predictor

Embedding = Callable[[Tensor], Tensor]
"""Maps an input to what tokens hold in its place: (..., n_I) -> (..., n_I)."""


class MLP(nn.Module):
    """Two linear maps with a GELU between them, for the inputs of context and query.

    Targets and documents do not go through it. The paper gives neither width nor depth.

    Args:
        inputs: n_I, which is also the width of the output.
        generator: draws the weights, with variance 1 / (width of the map's input); biases start at zero.
        hidden: the width between the two maps.
    """

    def __init__(self, inputs: int, generator: Generator, hidden: int = 32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(hidden, inputs, generator=generator) * inputs**-0.5)
        self.second = nn.Parameter(torch.randn(inputs, hidden, generator=generator) * hidden**-0.5)
        self.first_bias = nn.Parameter(torch.zeros(hidden))
        self.second_bias = nn.Parameter(torch.zeros(inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.first, self.first_bias)), self.second, self.second_bias)


def embed(tasks: LinearTasks, embedding: Embedding) -> LinearTasks:
    """Return the tasks of the dot-product interface with embedded inputs, that is, with tokens (m(x), m(x), y)."""
    x, y = embedding(tasks.context[..., : tasks.x.shape[-1]]), tasks.context[..., -1:]
    return replace(tasks, context=torch.cat([x, x, y], dim=-1), x=embedding(tasks.x))


def after(embedding: Embedding, predictor: Predictor) -> Predictor:
    """Return `predictor` on embedded tasks as a function of the raw inputs, so that sensitivities go through both."""
    return lambda tasks, x: predictor(embed(tasks, embedding), embedding(x))
