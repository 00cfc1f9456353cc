"""An MLP and a layer trained on a table, compared with gradient descent (In-Context Optimization, figures 2 and 7)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from linear_rag.comparison import PredictorComparison, compare, gradient_descent, loss, one_step_rate, trained
from linear_rag.nonlinear import MLP, after, embed
from linear_rag.normalization import Normalizer
from linear_rag.tables import Table
from linear_rag.tabular import split
from linear_rag.training import train_layer

TASKS = 1000
"""Number of tasks to fit the rate on, and of held-out tasks; the paper has 10,000, which takes ten times as long."""


@dataclass(frozen=True)
class Alignment:
    """How close a trained model is to a step of gradient descent, on held-out tasks.

    Attributes:
        features: the comparison with a step on the features that the model's own MLP makes from the inputs.
        inputs: the comparison with a step on the inputs themselves, as in the linear regime.
        shuffled_loss: the model's loss if each task has the example targets of another task.
        first_prediction: the mean absolute value of W2 x, from which the step on the inputs starts.
    """

    features: PredictorComparison
    inputs: PredictorComparison
    shuffled_loss: float
    first_prediction: float


def align(
    table: Table,
    normalization: Callable[[Tensor], Normalizer],
    *,
    seed: int = 0,
    steps: int = 200,
    teachers: bool = False,
) -> Alignment:
    """Train an MLP and a layer together, and compare them with one step at its best rate.

    The paper does not say which features gradient descent uses if there is an MLP, hence both comparisons.

    Args:
        table: the data set.
        normalization: normalization of the inputs.
        seed: seed of the split, W_z and M, the weights and the tasks.
        steps: optimizer steps, with 128 tasks each.
        teachers: see `linear_rag.tabular.TabularTasks`.
    """
    training, held_out = split(table, normalization, seed=seed, teachers=teachers)
    generator = Generator().manual_seed(seed)
    mlp = MLP(table.features.shape[1], generator)
    layer = train_layer(training, steps=steps, batch=128, seed=seed + 1, embedding=mlp)
    mlp.requires_grad_(False)
    model = after(mlp, trained(layer))
    fitted, tasks = training.sample(TASKS, generator), held_out.sample(TASKS, generator)
    of_others = torch.cat([tasks.context[..., :-1], tasks.context[..., -1:].roll(1, dims=0)], dim=-1)
    return Alignment(
        features=compare(model, after(mlp, gradient_descent(one_step_rate(embed(fitted, mlp)))), tasks),
        inputs=compare(model, gradient_descent(one_step_rate(fitted)), tasks),
        shuffled_loss=loss(model, replace(tasks, context=of_others)),
        first_prediction=float(tasks.first_prediction(tasks.x).abs().mean()),
    )
