"""How a prompt shows stored passages: as markers, at which ratios, and with which kept text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctx_compress_rag.soft_context import SoftContext, merge_factor


@dataclass(frozen=True)
class TransientPart:
    """A part of a passage: its text, its slots for one question (perhaps none), and a key that no other part has."""

    text: str
    soft: SoftContext
    key: tuple[str, ...]


class PassageRenderer:
    """The base class that turns stored passages into markers for a prompt.

    By default a marker stands for all slots of a passage, merged for a coarser ratio, and the question has no effect.
    """

    nestable = False  # whether the slots of a coarser ratio are weighted means of neighboring slots
    needs_question = False  # whether stored slots are no context by themselves

    def merge_factor(self, ratio: int, stored: int) -> int:
        """Return how many slots, stored at `stored` source tokens each, become one slot at `ratio`.

        Raises RatioError if the method cannot make this ratio of them, and ConfigError if it needs the question.
        """
        return merge_factor(ratio, stored, nestable=self.nestable)

    def check_ratio(self, ratio: int, stored: int) -> None:
        """Raise a RatioError if passages cannot be stored at the ratio `stored`, or then not be read at `ratio`."""
        self.merge_factor(ratio, stored)

    def render(
        self,
        store: Any,
        texts: Sequence[str],
        ids: Sequence[str],
        ratio: int | None,
        question: str | None,
        scope: str | None,
    ) -> list[str]:
        """Return stored texts as a prompt shows them: as markers, or as kept text with markers in it.

        `store` is a `SoftContextStore`; `texts` and `ids` go in pairs. `ratio` None is the finest. Raises ConfigError
        if the method needs a question and there is none, and errors as `check_ratio` and `SoftContextStore.markers`.
        """
        markers: list[str] = store.markers(ids, store.base_ratio if ratio is None else ratio, scope, texts)
        return markers
