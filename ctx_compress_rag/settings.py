"""What settings are made of."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


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
