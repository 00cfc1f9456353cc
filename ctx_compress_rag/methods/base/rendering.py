"""How a prompt shows stored passages: as markers, and at which ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ctx_compress_rag.soft_context import SoftContext, merge_factor


@dataclass(frozen=True)
class TransientPart:
    """A part of a passage: its text, the slots made of it for one question, if any, and what tells it from others."""

    text: str
    soft: SoftContext
    key: tuple[str, ...]


class PassageStore(Protocol):
    """What `PassageRenderer` needs of a store; see `SoftContextStore`."""

    @property
    def bundle(self) -> Any: ...
    @property
    def base_ratio(self) -> int: ...
    def get(
        self, ids: Sequence[str], scope: str | None = None, texts: Sequence[str] | None = None
    ) -> list[SoftContext | None]: ...
    def markers(
        self, ids: Sequence[str], ratio: int, scope: str | None = None, texts: Sequence[str] | None = None
    ) -> list[str]: ...
    def transient_markers(self, parts: Sequence[TransientPart], scope: str | None = None) -> list[str]: ...


class PassageRenderer:
    """How stored passages become markers in a prompt.

    By default a marker stands for a stored passage's slots, merged if the ratio is coarser; the question plays no part.

    Attributes:
        nestable: whether a coarser ratio is the weighted mean of neighboring slots.
    """

    nestable: ClassVar[bool] = False

    def merge_factor(self, ratio: int, stored: int) -> int:
        """How many slots, stored at `stored` source tokens each, become one at `ratio`.

        Raises:
            RatioError: the ratio cannot be made.
            ConfigError: this method needs the question.
        """
        return merge_factor(ratio, stored, nestable=self.nestable)

    def check_ratio(self, ratio: int, stored: int) -> None:
        """Raise a RatioError if passages stored at the ratio `stored` cannot be read at the other, or not stored."""
        self.merge_factor(ratio, stored)

    def render(
        self,
        store: PassageStore,
        texts: Sequence[str],
        ids: Sequence[str],
        ratio: int | None,
        question: str | None,
        scope: str | None,
    ) -> list[str]:
        """Stored texts as a prompt shows them: markers, or kept text with markers in it.

        `ratio` None is the finest. Only methods that read passages question by question need the `question`.

        Raises:
            ConfigError: the question is missing.
            RatioError: see `check_ratio`.
            MissingPassageError, PayloadError: see `SoftContextStore.markers`.
        """
        return store.markers(ids, store.base_ratio if ratio is None else ratio, scope, texts)
