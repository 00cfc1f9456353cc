"""What the postprocessors of the frameworks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.mark import Marked, Marking, MarkingOptions, OnMissing
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.strict import explain


class MarkingPostprocessor(BaseModel):
    """The base of a framework's postprocessor; comes before the framework's own base, which documents the fields."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    store: SoftContextStore = Field(exclude=True, repr=False)
    ratio: int | None = None
    token_budget: int | None = None
    on_missing: OnMissing = "compress"
    scope: str | None = None

    def __init__(self, store: SoftContextStore, **fields: Any) -> None:
        try:
            super().__init__(store=store, **fields)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None
        self._options().checked(self.store)

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled: the store belongs to this process."""
        raise ConfigError(f"{type(self).__name__} holds a store of this process: create it in the other process")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy with settings of its own; the store is shared."""
        return self.model_copy()

    def _mark(
        self,
        texts: Sequence[str],
        ids: Sequence[str | None],
        scores: Sequence[object],
        question: str | None,
    ) -> list[Marked]:
        return Marking(self.store, self._options()).mark(texts, ids, scores, question)

    def _options(self) -> MarkingOptions:
        return MarkingOptions(self.ratio, self.token_budget, self.on_missing, self.scope)
