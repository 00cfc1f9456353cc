"""Skimmed parts of passages, kept in memory for the prompts that show their markers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.soft_context import SoftContext

MAX_SLOTS = 16_384
"""How many slots are kept, of all tenants together. A slot takes 4 bytes times its width."""


@dataclass(frozen=True)
class SkimmedPart:
    """A part of a passage: its text, and the slots made of it for one question (none without skimming)."""

    text: str
    soft: SoftContext


class RecentParts:
    """The parts last used, by marker. Thread-safe.

    They are not written to the store: readers do not hold its lock for writing, and every question would add slots.
    """

    def __init__(self, most: int = MAX_SLOTS) -> None:
        self._most = most
        self._parts: OrderedDict[str, SkimmedPart] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, parts: Mapping[str, SkimmedPart]) -> None:
        """Keep the parts that one prompt needs; those least recently used go.

        Raises:
            ConfigError: together they need more slots than are kept.
        """
        needed = sum(map(_cost, parts.values()))
        if needed > self._most:
            raise ConfigError(
                f"a prompt needs {needed} slots made for its question, and {self._most} are kept: retrieve fewer "
                "passages"
            )
        with self._lock:
            for marker, part in parts.items():
                self._parts[marker] = part
                self._parts.move_to_end(marker)
            size = sum(map(_cost, self._parts.values()))
            while size > self._most:
                size -= _cost(self._parts.popitem(last=False)[1])

    def get(self, marker: str) -> SkimmedPart | None:
        """The part of a marker; None if it is gone."""
        with self._lock:
            if marker in self._parts:
                self._parts.move_to_end(marker)
            return self._parts.get(marker)


def _cost(part: SkimmedPart) -> int:
    return max(1, part.soft.n_slots)  # a part without slots takes memory, too
