"""Stages of training, and the table in which they register."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from ctx_compress_rag.training.config import BaseRecipe
from ctx_compress_rag.training.engine.loop import Job


@dataclass(frozen=True)
class Stage:
    """A kind of recipe.

    Attributes:
        recipe: the class of its recipes, whose literal `stage` is the stage's name.
        start: makes the job from a recipe.
    """

    recipe: type[BaseRecipe]
    start: Callable[[Any], Job]


STAGES: dict[str, Stage] = {}
"""The registered stages by name."""


def register(stage: Stage) -> None:
    """Register a stage under its recipe's literal `stage`."""
    [name] = get_args(stage.recipe.model_fields["stage"].annotation)
    STAGES[name] = stage
