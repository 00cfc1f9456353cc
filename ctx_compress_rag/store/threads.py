"""Calls that Ctrl-C does not break off, because each runs in a thread of its own while the caller waits.

Python raises KeyboardInterrupt in the main thread, between any two instructions, even between taking a lock and the
`try` that releases it. A call can also limit how long the caller waits for Chroma.
"""

from __future__ import annotations

import _thread  # threading.Thread.start takes a lock in the caller, which an interrupt could leave behind
import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

_EXIT_SECONDS = 30.0  # how long the interpreter waits at its end for calls whose caller has gone
_LOOK_SECONDS = 0.2  # how often a caller looks at the time, and on Windows for a Ctrl-C
_here = threading.local()
_running: set[_ShieldedCall] = set()


class _ShieldedCall:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.abandoned = False
        self.limit: tuple[float, Callable[[], Exception]] | None = None
        self._work = work
        self._context = copy_context()
        self._outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run(self) -> None:
        _here.call = self
        _running.add(self)
        try:
            self._outcome.put((self._context.run(self._work), None))
        except BaseException as error:
            self._outcome.put((None, error))
        finally:
            _running.discard(self)
            _here.call = None

    def result(self) -> Any:
        while True:
            try:
                result, error = self._outcome.get(timeout=_LOOK_SECONDS)
            except Empty:
                if (limit := self.limit) and time.monotonic() > limit[0]:
                    raise limit[1]() from None
                continue
            if error is not None:
                raise error
            return result


def shielded_from_interrupts(function: Callable[P, T]) -> Callable[P, T]:
    """Run each call in a new thread, or directly if the caller is in such a thread or no thread can be started.

    If the caller is interrupted, the call goes on, and can ask `caller_gone` whether to stop.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if getattr(_here, "call", None) is not None:
            return function(*args, **kwargs)
        call = _ShieldedCall(partial(function, *args, **kwargs))
        try:
            try:
                _thread.start_new_thread(call.run, ())
            except RuntimeError:
                call.run()
            return cast("T", call.result())
        except BaseException:
            call.abandoned = True
            raise

    return run


@contextmanager
def limit_wait(seconds: float, late: Callable[[], Exception]) -> Iterator[None]:
    """Raise `late()` in the caller of this shielded call if the block takes longer; the block goes on."""
    call: _ShieldedCall = _here.call
    call.limit = time.monotonic() + seconds, late
    try:
        yield
    finally:
        call.limit = None


def caller_gone() -> bool:
    """Whether the caller of this shielded call was interrupted, so that the call should stop at the next safe place."""
    return bool(getattr(getattr(_here, "call", None), "abandoned", False))


def _finish() -> None:
    # A thread that returns from native code after the interpreter's end would crash the process.
    end = time.monotonic() + _EXIT_SECONDS
    for call in list(_running):
        call.abandoned = True
    while _running and time.monotonic() < end:
        time.sleep(0.01)


atexit.register(_finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # the child has none of these threads
