"""Slots that hold for one question only: kept in memory, where those last used stay."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from ctx_compress_rag.soft_context import SoftContext


@dataclass(frozen=True)
class Skimmed:
    """A part of a passage as slots that one question asked for (Read As Human, eq. 4).

    Attributes:
        question: the question.
        ratio: the ratio it was asked with.
        passage: the whole passage's text.
        start: where the part begins in it.
        end: where the part ends in it.
        soft: the part's slots; none where skimmed parts are dropped.
    """

    question: str
    ratio: int
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
        """What it counts for in memory: its slots, or 1, for a part without slots takes room, too."""
        return max(1, self.soft.n_slots)

    @property
    def fields(self) -> tuple[str, ...]:
        """What tells it from others."""
        return self.question, str(self.ratio), self.passage, str(self.start), str(self.end)


class SkimmedSlots:
    """Parts of passages by name; beyond `limit` slots the least recently used go. Safe in threads.

    Each scope has one of its own, so that no tenant's questions evict another's slots.

    They are not written to the store: readers have no writer's lock, and every question would add its own.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[str, Skimmed] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def put(self, name: str, part: Skimmed) -> None:
        """Keep a part; a part of the same name gives way."""
        with self._lock:
            self._drop(name)
            self._kept[name] = part
            self._size += part.cost
            while self._size > self.limit and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))

    def get(self, name: str) -> Skimmed | None:
        """The part of this name, None where it is gone."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    def _drop(self, name: str) -> None:
        part = self._kept.pop(name, None)
        self._size -= part.cost if part else 0
