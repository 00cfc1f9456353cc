"""A trained layer and gradient descent: losses, predictions, sensitivities (In-Context Optimization, appendix C.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from linear_rag.attention import LinearAttention, gradient_step_layer, stack
from linear_rag.tasks import LinearTasks, Predictor


@dataclass(frozen=True)
class PredictorComparison:
    """A comparison of a predictor with a reference; all values are means over tasks.

    Attributes:
        loss, reference_loss: squared errors (eq. 21).
        prediction_difference: absolute difference of the predictions.
        sensitivity_cosine, sensitivity_distance: between the predictions' gradients with respect to the query's input.
    """

    loss: float
    reference_loss: float
    prediction_difference: float
    sensitivity_cosine: float
    sensitivity_distance: float


def gradient_descent(rate: float, depth: int = 1) -> Predictor:
    """Return the constructed predictor: `depth` layers of lemma 1, or steps from W1 = 0 and the tasks' own W2."""

    def predict(tasks: LinearTasks, x: Tensor) -> Tensor:
        layer = gradient_step_layer(x.new_zeros(1, x.shape[-1]), tasks.w2, tasks.context.shape[-2], rate)
        queries = tasks.queries(x, tasks.first_prediction(x))
        return stack(layer, tasks.context, queries, depth, outputs=1).flatten()

    return predict


def trained(layer: LinearAttention, depth: int = 1) -> Predictor:
    """Return a predictor of `depth` layers with the given weights. The tasks say where the layers see the documents."""

    def predict(tasks: LinearTasks, x: Tensor) -> Tensor:
        queries = tasks.queries(x, x.new_zeros(len(x)))
        return stack(layer, tasks.context, queries, depth, outputs=1, injected=tasks.injected).flatten()

    return predict


def interpolation(layer: LinearAttention, rate: float) -> Predictor:
    """Return one layer halfway between `layer` and gradient descent, by the two products of weights that matter.

    Scaling W_K^T W_Q up and P W_V down has no effect, so the trained layer is first rescaled so that its scores of keys
    and queries match the constructed layer's, by least squares. The injected row is left out.
    """

    def predict(tasks: LinearTasks, x: Tensor) -> Tensor:
        step = gradient_step_layer(x.new_zeros(1, x.shape[-1]), tasks.w2, tasks.context.shape[-2], rate)
        match, step_match = layer.key.mT @ layer.query, step.key.mT @ step.query
        queries = tasks.queries(x, tasks.first_prediction(x) / 2)
        scores, step_scores = (tasks.context @ each @ queries.mT for each in (match, step_match))
        scale = (scores * step_scores).sum() / step_scores.square().sum()
        identity = torch.eye(len(match))
        halfway = LinearAttention(
            query=(match / scale + step_match) / 2,
            key=identity,
            value=(layer.output @ layer.value * scale + step.output @ step.value) / 2,
            output=identity,
        )
        return stack(halfway, tasks.context, queries, 1, outputs=1).flatten()

    return predict


def loss(predictor: Predictor, tasks: LinearTasks) -> float:
    """Return the mean squared error of the queries' predictions (eq. 21)."""
    with torch.no_grad():
        return float(F.mse_loss(predictor(tasks, tasks.x), tasks.target))


def compare(predictor: Predictor, reference: Predictor, tasks: LinearTasks) -> PredictorComparison:
    """Return the quantities that the paper reports, measured on the given tasks."""
    prediction, sensitivity = _with_sensitivity(predictor, tasks)
    expected, expected_sensitivity = _with_sensitivity(reference, tasks)
    return PredictorComparison(
        loss=float(F.mse_loss(prediction, tasks.target)),
        reference_loss=float(F.mse_loss(expected, tasks.target)),
        prediction_difference=float((prediction - expected).abs().mean()),
        sensitivity_cosine=float(F.cosine_similarity(sensitivity, expected_sensitivity).mean()),
        sensitivity_distance=float((sensitivity - expected_sensitivity).norm(dim=-1).mean()),
    )


def learned_rates(layer: LinearAttention, inputs: int, examples: int) -> tuple[float, float]:
    """Return the rates that a single layer uses in place of eta, for x1 and for x2 (eq. 10, solved for eta).

    Each is the mean of its part of the diagonal of W_K^T W_Q, times the factor of P W_V on y, times N. For gradient
    descent both are eta.

    Args:
        layer: weights for tokens (x1, x2, y) with scalar y.
        inputs: the width of x1.
        examples: N.
    """
    diagonal = (layer.key.mT @ layer.query).diagonal() * (layer.output @ layer.value)[-1, -1] * examples
    return float(diagonal[:inputs].mean()), float(diagonal[inputs:-1].mean())


def feature_rates(variances: Tensor, examples: int) -> Tensor:
    """Return one rate for each feature, with which one gradient step from zero has the least expected loss.

    Not in the paper. For independent, centered, uniform features and a standard normal teacher the expected loss is a
    parabola in each rate. Its minimum contains E[x^2] and, for a feature times itself, E[x^4].

    Args:
        variances: variances of x1 and x2, concatenated, shape (d1 + d2,).
        examples: N.

    Returns:
        shape (d1 + d2,).
    """
    return 1 / ((variances.sum() - variances) / examples + variances * (1 + 0.8 / examples))


def one_step_rate(tasks: LinearTasks) -> float:
    """Return the exact `best_rate` of a single step, without an upper limit; the loss is a parabola in the rate."""
    start = tasks.first_prediction(tasks.x)
    move = gradient_descent(1.0)(tasks, tasks.x) - start
    return float((move * (tasks.target - start)).sum() / move.square().sum())


def best_rate(tasks: LinearTasks, depth: int = 1, highest: float = 3.0) -> float:
    """Return the learning rate with which `gradient_descent` has the least loss on `tasks` (appendix C.1).

    It is searched among twelve rates up to `highest`, then by golden section around the best, to within 0.005.
    """

    def at(rate: float) -> float:
        return loss(gradient_descent(rate, depth), tasks)

    spacing = highest / 12
    center = min((spacing * step for step in range(1, 13)), key=at)
    low, high = center - spacing, center + spacing
    shrink = (5**0.5 - 1) / 2
    while high - low > 0.01:
        left, right = high - shrink * (high - low), low + shrink * (high - low)
        low, high = (low, right) if at(left) < at(right) else (left, high)
    return (low + high) / 2


def _with_sensitivity(predictor: Predictor, tasks: LinearTasks) -> tuple[Tensor, Tensor]:
    """Return predictions, and the gradient of each with respect to its own query's input."""
    x = tasks.x.clone().requires_grad_()
    prediction = predictor(tasks, x)
    (sensitivity,) = torch.autograd.grad(prediction.sum(), x)
    return prediction.detach(), sensitivity
