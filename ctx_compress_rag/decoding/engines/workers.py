"""Threads that answer in the background, and how they end with the program."""

from __future__ import annotations

import atexit
import logging
import threading
from weakref import WeakSet

from ctx_compress_rag.decoding.sampling import Generation, Put

logger = logging.getLogger(__name__)

_END_SECONDS = 30

WORKERS: WeakSet[threading.Thread] = WeakSet()
"""The threads that answer; each ends soon after `ENDING` is set."""
ENDING = threading.Event()


def deliver(put: Put, answer: Generation | BaseException) -> None:
    """Call a caller's `put` with the answer or error. Errors from `put` are logged and stop no other request."""
    try:
        put(answer)
    except Exception:
        logger.exception("a caller's `put` failed")


@atexit.register
def _end() -> None:
    """Stop answering when the program ends: a thread that Python ends inside native code aborts the process."""
    ENDING.set()
    for thread in list(WORKERS):
        thread.join(_END_SECONDS)  # a thread that waits for a decoder which the caller still holds never ends
    ENDING.clear()
