"""The average of the weights over the training steps, instead of the last weights (Polyak and Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ctx_compress_rag.training.engine.parameters import load_trained_state, trained


class WeightAverage:
    """An exponential moving average of the trained parameters, in float32.

    For the first 1 / (1 - decay) steps it is the plain mean of all steps' weights, so that the first do not linger.

    Args:
        model: its parameters that require gradients are averaged.
        decay: the share of the average that a step keeps.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._model, self._trained = model, trained(model)
        self._averages = {name: p.detach().float().clone() for name, p in self._trained.items()}

    def add(self, step: int) -> None:
        """Add the weights after a step; steps count from 1."""
        kept = min(self._decay, (step - 1) / step)
        weights = [p.detach().float() for p in self._trained.values()]
        torch._foreach_lerp_(list(self._averages.values()), weights, 1 - kept)

    def put_in(self) -> None:
        """Copy the averages into the model."""
        load_trained_state(self._model, self._averages)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the context, the model has the averages."""
        own = {name: p.detach().clone() for name, p in self._trained.items()}
        self.put_in()
        try:
            yield
        finally:
            load_trained_state(self._model, own)

    def state(self) -> dict[str, Tensor]:
        """The averages, by the parameters' names."""
        return {name: value.cpu().contiguous() for name, value in self._averages.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for name, value in self._averages.items():
            value.copy_(state[name])
