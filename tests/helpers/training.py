"""Trainings that break off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import Trainer


class Killed(RuntimeError):
    """What ends a training."""


@contextmanager
def killed(after: int, within: str = "") -> Iterator[None]:
    """The training inside breaks off when it has made so many steps, and its output folder has `within` in its name."""
    real = Trainer.training_step

    def step(trainer: Any, *args: Any, **settings: Any) -> Any:
        if trainer.state.global_step == after and within in trainer.args.output_dir:
            raise Killed
        return real(trainer, *args, **settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "training_step", step)
        with pytest.raises(Killed):
            yield
