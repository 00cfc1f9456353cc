"""Work that an exception must not break off, in threads that no Ctrl-C reaches.

Python raises KeyboardInterrupt in the main thread, between any two instructions: also between taking a lock and the
`try` that releases it. So every lock of a store is taken in a thread of its own, while the caller only waits. This
also puts a limit on how long it waits.
"""

from __future__ import annotations

import _thread  # threading.Thread.start takes a lock in the caller, which an interrupt could leave behind
import atexit
import math
import os
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar, cast

T = TypeVar("T")

_EXIT_SECONDS = 30.0
"""How long the interpreter waits at its end for work whose caller has gone."""
_LOOK_SECONDS = 0.5  # how often a caller sees a Ctrl-C that did not wake it, as on Windows
_mine = threading.local()
_running: set[_Work[object]] = set()


class _Work(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self.abandoned = False
        self._work = work
        self._context = copy_context()
        self._outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run(self) -> None:
        _mine.work = self
        _running.add(cast("_Work[object]", self))
        try:
            outcome: tuple[T | None, BaseException | None] = (self._context.run(self._work), None)
        except BaseException as error:
            outcome = (None, error)
        _running.discard(cast("_Work[object]", self))
        self._outcome.put(outcome)

    def result(self, seconds: float | None) -> T:
        end = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            try:
                result, error = self._outcome.get(timeout=max(0, min(_LOOK_SECONDS, end - time.monotonic())))
            except Empty:
                if time.monotonic() < end:
                    continue
                raise TimeoutError from None
            if error is not None:
                raise error
            return cast(T, result)


def uninterrupted(work: Callable[[], T], seconds: float | None = None) -> T:
    """Run `work` in a thread of its own and return what it returns; in such a thread, run it right away.

    If the caller is interrupted, the work goes on, and can ask whether it is `abandoned`.

    Raises:
        TimeoutError: it took longer than `seconds`, and goes on.
    """
    if getattr(_mine, "work", None) is not None:
        return work()
    running = _Work(work)
    try:
        _thread.start_new_thread(running.run, ())
        return running.result(seconds)
    except BaseException:
        running.abandoned = True
        raise


def abandoned() -> bool:
    """Whether the caller of this thread's work has gone, so that it should stop at the next safe place."""
    return bool(getattr(getattr(_mine, "work", None), "abandoned", False))


def _finish() -> None:
    # A thread that returns from native code after the interpreter's end would crash the process.
    end = time.monotonic() + _EXIT_SECONDS
    for work in list(_running):
        work.abandoned = True
    while _running and time.monotonic() < end:
        time.sleep(0.01)


atexit.register(_finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # the child has none of these threads
