"""The base class of settings."""

from __future__ import annotations

from functools import cache, reduce
from operator import or_
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class Strict(BaseModel):
    """Immutable settings that refuse unknown keys by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@cache
def any_of(classes: tuple[type[Strict], ...], key: str) -> TypeAdapter[Any]:
    """An adapter that reads settings of any of these classes, told apart by their literal field `key`."""
    union: Any = Annotated[reduce(or_, classes), Field(discriminator=key)]
    return TypeAdapter(union)
