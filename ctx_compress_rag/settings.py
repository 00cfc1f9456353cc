"""What settings are made of."""

from __future__ import annotations

from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer


class Strict(BaseModel):
    """Settings that never change, unknown keys refused by name.

    Attributes:
        left_out: fields that are written only where they differ from their default. A field added after bundles
            were made belongs here: those keep their config, and with it their fingerprint.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
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
    """Reads settings of one of these classes, told apart by the field `key`, which is a literal in each."""
    union: Any = Annotated[reduce(or_, classes), Field(discriminator=key)]
    return TypeAdapter(union)
