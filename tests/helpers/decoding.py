"""A tiny decoder's passages and question, and threads that may hang."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PASSAGES = {
    "a": "Orla Drumwell was born in Pellmouth. She kept bees and wrote three books about the northern coast.",
    "b": "Pellmouth is a town.",
    "c": "The Harrow Institute was founded in 1911, and it moved to Stavely after the flood. " * 5,
}
QUESTION = "Where was Orla Drumwell born?"
WAIT = 120  # seconds after which a test counts as hanging; nothing here takes a fraction of it, but machines are shared


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of `work`, run by another thread; fails where it hangs."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work).result(timeout=WAIT)
    finally:
        pool.shutdown(wait=False)
