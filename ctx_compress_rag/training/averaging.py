"""The average of the weights along a training, in place of the last ones (Polyak and Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ctx_compress_rag.training.trained import load_trained_state, trained


class WeightAverage:
    """An exponential moving average of what is trained, in float32.

    It is the plain mean of all steps' weights until they are 1 / (1 - decay): the first ones do not linger.

    Args:
        model: whose parameters that require gradients are averaged.
        decay: the share of the average that a step keeps.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._model = model
        self._averages = {name: p.detach().float().clone() for name, p in trained(model).items()}

    def add(self, step: int) -> None:
        """Take in the weights after a step, which are counted from 1."""
        kept = min(self._decay, (step - 1) / step)
        weights = [p.detach().float() for p in trained(self._model).values()]
        torch._foreach_lerp_(list(self._averages.values()), weights, 1 - kept)

    def put_in(self) -> None:
        """Give the model the averages."""
        load_trained_state(self._model, self._averages)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averages, within the context."""
        own = {name: p.detach().clone() for name, p in trained(self._model).items()}
        self.put_in()
        try:
            yield
        finally:
            load_trained_state(self._model, own)

    def state(self) -> dict[str, Tensor]:
        """The averages, by the parameters' names."""
        return {name: value.cpu().contiguous() for name, value in self._averages.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
        for name, value in self._averages.items():
            value.copy_(state[name])
