"""Parts of passages whose slots were made for one question, kept in memory for the prompts with their markers."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.rendering import TransientPart
from ctx_compress_rag.store.marker import Marker

MAX_SLOTS = 16_384  # how many slots are kept for all tenants together; a slot takes four bytes for each dimension


class TransientParts:
    """The parts of passages that were used last, by marker, of at most `most` slots together. Thread-safe.

    They are not stored, because readers do not hold the store's write lock, and every question would add slots.
    """

    def __init__(self, most: int = MAX_SLOTS) -> None:
        self._most = most
        self._parts: OrderedDict[str, TransientPart] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, parts: Mapping[str, TransientPart]) -> None:
        """Keep the parts of one prompt, and drop those used longest ago. Raise ConfigError if these are too many."""
        needed = sum(map(_cost, parts.values()))
        if needed > self._most:
            raise ConfigError(f"a prompt needs {needed} slots of its own, {self._most} are kept: use fewer passages")
        with self._lock:
            for marker, part in parts.items():
                self._parts[marker] = part
                self._parts.move_to_end(marker)
            size = sum(map(_cost, self._parts.values()))
            while size > self._most:
                size -= _cost(self._parts.popitem(last=False)[1])

    def split(self, markers: Sequence[Marker]) -> tuple[dict[Marker, TransientPart], list[Marker]]:
        """Return the kept part of each marker that has one, and the other markers."""
        with self._lock:
            kept = {marker: self._parts[marker.text] for marker in markers if marker.text in self._parts}
            for marker in kept:
                self._parts.move_to_end(marker.text)
        return kept, [marker for marker in markers if marker not in kept]


def _cost(part: TransientPart) -> int:
    return max(1, part.soft.n_slots)  # a part without slots takes memory, too
