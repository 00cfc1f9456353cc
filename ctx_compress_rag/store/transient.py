"""Slots made for one question, kept in memory; beyond a limit, the least recently used are dropped."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.reading import TransientContext

LIMIT = 16_384
"""How many slots are kept for a scope. A slot takes 4 bytes times its width."""


class TransientContexts:
    """Parts of passages by scope and name. Thread-safe.

    Each scope has its own limit, so that no tenant's questions evict another's slots. The slots are not written to the
    store: readers do not hold the write lock, and every question would add slots.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._scopes: defaultdict[str, OrderedDict[str, TransientContext]] = defaultdict(OrderedDict)
        self._lock = threading.Lock()

    def put(self, scope: str, contexts: Mapping[str, TransientContext]) -> None:
        """Keep the parts that one prompt needs; they replace parts of the same names.

        Raises:
            ConfigError: together they need more slots than are kept.
        """
        needed = sum(map(_cost, contexts.values()))
        if needed > self._limit:
            raise ConfigError(
                f"a prompt needs {needed} slots made for its question, and {self._limit} are kept: retrieve fewer "
                "passages"
            )
        with self._lock:
            kept = self._scopes[scope]
            for name, context in contexts.items():
                kept[name] = context
                kept.move_to_end(name)
            size = sum(map(_cost, kept.values()))
            while size > self._limit:
                size -= _cost(kept.popitem(last=False)[1])

    def get(self, scope: str, name: str) -> TransientContext | None:
        """The part of this name; None if it is gone."""
        with self._lock:
            kept = self._scopes[scope]
            if name in kept:
                kept.move_to_end(name)
            return kept.get(name)


def _cost(context: TransientContext) -> int:
    return max(1, context.soft.n_slots)  # a part without slots takes memory, too
