"""A lock that threads get in the order in which they asked for it."""

import threading
from collections import deque


class FairLock:
    """A fair lock, which a thread that holds it may take again, and whose owner can ask whether any thread waits.

    A thread that takes an ordinary lock again and again, as a busy decoder does, gets it before the threads that wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0

    @property
    def held(self) -> bool:
        return self._owner == threading.get_ident()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def __enter__(self) -> None:
        with self._changed:
            if not self.held:
                turn = object()
                self._waiting.append(turn)
                try:
                    self._changed.wait_for(lambda: self._owner is None and self._waiting[0] is turn)
                finally:  # also if the wait is interrupted: the next in line must not wait for this thread
                    self._waiting.remove(turn)
                    self._changed.notify_all()
                self._owner = threading.get_ident()
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()
