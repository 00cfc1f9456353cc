"""What the postprocessors of the frameworks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ctx_compress_rag.bundle.config import explain
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.budget import Relevance
from ctx_compress_rag.marking.mark import OnMissing, mark, settled, stored_ids
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import OnUnreadable


class MarkingPostprocessor(BaseModel):
    """The base of a framework's postprocessor; comes before the framework's own base, which documents the fields."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    store: SoftContextStore = Field(exclude=True, repr=False)
    ratio: int | None = None
    reduction: int | None = None
    token_budget: int | None = None
    on_missing: OnMissing = "compress"
    on_unreadable: OnUnreadable = "warn"
    scope: str | None = None

    def __init__(self, *, mode: str | None = None, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None
        self.ratio, self.reduction = settled(
            self.store,
            self.ratio,
            self.reduction,
            self.token_budget,
            self.on_missing,
            self.scope,
            self.on_unreadable,
            mode,
        )

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled: the store belongs to this process."""
        raise ConfigError(f"{type(self).__name__} holds a store of this process: create it in the other process")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy with settings of its own; the store is shared."""
        return self.model_copy()

    def _marked(
        self,
        texts: Sequence[str],
        ids: Sequence[str | None],
        scores: Sequence[Relevance] | None,
        question: str | None,
    ) -> list[str]:
        """Call `mark` with these fields; `ids` are those of the app, looked up by `stored_ids`."""
        return mark(
            self.store,
            texts,
            stored_ids(self.store, texts, ids, self.scope),
            ratio=self.ratio,
            reduction=self.reduction,
            token_budget=self.token_budget,
            scores=scores,
            on_missing=self.on_missing,
            scope=self.scope,
            question=question,
            on_unreadable=self.on_unreadable,
        )
