"""Trainings that break off, what they tell, and examples of unlike length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from ctx_compress_rag.data.examples import Example, Turn

UNLIKE = [
    Example(("Orla Reedwen keeps a goat.",), (Turn("Which pet?", ("a goat",)),)),
    Example(("Kormoor lies on the river Halen.",), (Turn("Where is it?", ("on the river Halen, near the sea " * 4,)),)),
    Example(("Pell trades in salt.",), (Turn("What?", ("salt",)), Turn("Who?", ("Pell, the town of salt and tin",)))),
    Example(("The ferry leaves at dawn.",), (Turn("When?", ("at dawn, every day but on Sundays, if at all",)),)),
]
"""Answers of few and of many tokens: a mean over tokens is not one over examples."""


def losses(folder: Path) -> list[float]:
    """A finished training's loss at each step that it logged."""
    return [row["loss"] for row in json.loads((folder / "loss.json").read_text())]


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
