"""The base class of settings."""

from __future__ import annotations

from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer


class Strict(BaseModel):
    """Immutable settings that refuse unknown keys by name.

    Attributes:
        left_out: fields that are written only if they differ from their default. Put fields that are added later
            here, so that existing bundles keep their config, and with it their fingerprint.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    left_out: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _leave_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        for name in self.left_out & written.keys():
            if getattr(self, name) == type(self).model_fields[name].default:
                del written[name]
        return written


@cache
def any_of(classes: tuple[type[Strict], ...], key: str) -> TypeAdapter[Any]:
    """An adapter that reads settings of any of these classes, told apart by their literal field `key`."""
    union: Any = Annotated[reduce(or_, classes), Field(discriminator=key)]
    return TypeAdapter(union)
