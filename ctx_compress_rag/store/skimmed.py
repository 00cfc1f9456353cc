"""Slots for one question only, kept in memory; beyond a limit, the least recently used are dropped."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctx_compress_rag.errors import ConfigError, MissingPassageError
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store.marker import Marker


@dataclass(frozen=True)
class Skimmed:
    """A part of a passage, skimmed into slots for one question (Read As Human, eq. 4).

    Attributes:
        question: the question.
        reduction: the reduction used for the question.
        passage: the whole passage's text.
        start: where the part begins in it.
        end: where the part ends in it.
        soft: the part's slots; none if skimmed parts are dropped.
    """

    question: str
    reduction: int
    passage: str
    start: int
    end: int
    soft: SoftContext

    @property
    def text(self) -> str:
        """The part's own text."""
        return self.passage[self.start : self.end]

    @property
    def cost(self) -> int:
        """What it counts against the limit: its slots, but at least 1, since the part itself takes memory, too."""
        return max(1, self.soft.n_slots)

    @property
    def fields(self) -> tuple[str, ...]:
        """The values that identify the part."""
        return self.question, str(self.reduction), self.passage, str(self.start), str(self.end)


class SkimmedSlots:
    """Parts of passages by scope and name; beyond `limit` slots per scope, the least recently used go. Thread-safe.

    Each scope has its own limit, so that no tenant's questions evict another's slots.

    Slots are not written to the store: readers do not hold the write lock, and every question would add slots.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._scopes: dict[str, _LeastRecentlyUsed] = {}

    def put(self, scope: str, parts: Mapping[str, Skimmed]) -> None:
        """Keep the parts that one prompt needs; they replace parts of the same names.

        Raises:
            ConfigError: together they need more than `limit` slots.
        """
        needed = sum(part.cost for part in parts.values())
        if needed > self.limit:
            raise ConfigError(
                f"a prompt needs {needed} skimmed slots and the store keeps {self.limit}: "
                f"retrieve fewer passages, or open the store with skimmed_slots={needed} or more"
            )
        kept = self._of(scope)
        for name, part in parts.items():
            kept.put(name, part)

    def find(self, markers: Sequence[Marker]) -> dict[Marker, Skimmed]:
        """The parts that markers stand for.

        Raises:
            MissingPassageError: a part is no longer in memory.
        """
        parts = {marker: self._of(marker.scope).get(marker.passage) for marker in markers}
        found = {marker: part for marker, part in parts.items() if part is not None}
        if len(found) < len(parts):
            raise MissingPassageError(
                f"the slots of {len(parts) - len(found)} skimmed part(s) are gone: they are for one question, in the "
                f"memory of the store that wrote their markers, which keeps the last {self.limit} of a scope: "
                "give postprocessor and LLM the same store, retrieve again, or open the store with more skimmed_slots"
            )
        return found

    def _of(self, scope: str) -> _LeastRecentlyUsed:
        return self._scopes.setdefault(scope, _LeastRecentlyUsed(self.limit))


class _LeastRecentlyUsed:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Skimmed] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def put(self, name: str, part: Skimmed) -> None:
        """Keep a part; it replaces a part of the same name."""
        with self._lock:
            self._drop(name)
            self._kept[name] = part
            self._size += part.cost
            while self._size > self._limit:
                self._drop(next(iter(self._kept)))

    def get(self, name: str) -> Skimmed | None:
        """The part of this name; None if it is gone."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    def _drop(self, name: str) -> None:
        part = self._kept.pop(name, None)
        self._size -= part.cost if part else 0
