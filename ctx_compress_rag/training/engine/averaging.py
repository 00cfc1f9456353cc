"""The average of the weights over the training steps, instead of the last weights (Polyak and Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ctx_compress_rag.training.engine.optimizers import trained


class WeightAverage:
    """An exponential moving average of the trained parameters.

    For the first 1 / (1 - decay) steps it is the plain mean of all steps' weights, so that the first do not linger.

    Args:
        model: its parameters that require gradients are averaged.
        decay: the share of the average that a step keeps.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._weights = nn.ParameterList(trained(model).values())

        def mean(average: Tensor, weight: Tensor, count: Tensor | int) -> Tensor:
            return average.lerp(weight, 1 - min(decay, float(count / (count + 1))))

        self._average = AveragedModel(self._weights, avg_fn=mean)

    def update(self) -> None:
        """Add the weights after a step."""
        self._average.update_parameters(self._weights)

    @torch.no_grad()
    def apply(self) -> None:
        """Give the model the averages."""
        for weight, average in zip(self._weights, self._average.parameters(), strict=True):
            weight.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """The averages and their count."""
        return self._average.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._average.load_state_dict(state)
