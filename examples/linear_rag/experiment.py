"""A training run compared with gradient descent: figures 1, 5, 6 and 8 (In-Context Optimization, appendices C, E)."""

from dataclasses import dataclass

from torch import Generator

from linear_rag.attention import LinearAttention
from linear_rag.comparison import PredictorComparison, best_rate, compare, gradient_descent, trained
from linear_rag.tasks import Interface, LinearTasks
from linear_rag.training import Freedom, train_layer

TASKS = 10_000
"""Number of tasks for the line search, and of held-out tasks (appendix C.1)."""


@dataclass(frozen=True)
class Run:
    """A trained layer, and the gradient descent that it is compared with.

    Attributes:
        layer: the trained weights.
        depth: how many times the layer is applied, and how many gradient steps are taken.
        rate: the learning rate found by the line search.
        held_out: tasks that the layer was not trained on.
        history: comparisons on the held-out tasks by training step, the first before training.
    """

    layer: LinearAttention
    depth: int
    rate: float
    held_out: LinearTasks
    history: dict[int, PredictorComparison]

    @property
    def last(self) -> PredictorComparison:
        """Return the comparison after training."""
        return self.history[max(self.history)]


def run(
    interface: Interface, *, depth: int = 1, steps: int, every: int = 100, freedom: Freedom = "writes y", seed: int = 0
) -> Run:
    """Train a layer, and compare it every `every` steps with `depth` steps of gradient descent."""
    generator = Generator().manual_seed(seed)
    rate = best_rate(interface.sample(TASKS, generator), depth)
    held_out = interface.sample(TASKS, generator)
    history: dict[int, PredictorComparison] = {}

    def watch(step: int, layer: LinearAttention) -> None:
        history[step] = compare(trained(layer, depth), gradient_descent(rate, depth), held_out)

    layer = train_layer(interface, depth=depth, steps=steps, seed=seed + 1, freedom=freedom, watch=watch, every=every)
    return Run(layer, depth, rate, held_out, history)
