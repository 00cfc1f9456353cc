"""Decide which of many callers' prompts a model reads when, and give the callers their answers.

A thread answers while there are requests, and then ends. Prompts join while others are being answered, and leave when
their answers end, so eight callers are answered nearly as fast as one batch of eight prompts.
"""

import atexit
import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

from ctx_compress_rag.decoding.answering import GrowingAnswer
from ctx_compress_rag.decoding.sampling import Generation, Put
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.store.marker import current_scope

logger = logging.getLogger(__name__)

_END_SECONDS = 30
_STEPS = 8  # passes of one group before the next group's turn
_WORKERS: WeakSet[threading.Thread] = WeakSet()
_ENDING = threading.Event()


@dataclass(eq=False)
class DecodingRequest:
    """A caller's prompt, and its answer so far."""

    read_by: Any  # what reads the prompt, hashable; only requests with the same one share passes
    prompt: Prompt
    answering: GrowingAnswer
    put: Put
    canceled: threading.Event  # set when the answer is no longer wanted
    most: int  # requests in a pass with this one
    scope: str | None = field(default_factory=current_scope)  # the tenant or user; scopes take turns

    @property
    def last(self) -> tuple[int, int]:
        """Return the position and the id of the answer's last token."""
        ids = self.answering.ids
        return self.prompt.length + len(ids) - 1, ids[-1]

    def deliver(self, answer: Generation | BaseException) -> None:
        """Give the caller the answer or error. An error in the caller's code is logged and stops no other request."""
        if not self.canceled.is_set():
            try:
                self.put(answer)
            except Exception:
                logger.exception("a caller's `put` failed")


class DecodingGroup(ABC):
    """The requests that one model answers; a request in `rows` has begun its answer."""

    def __init__(self) -> None:
        self.waiting: list[DecodingRequest] = []  # their turn has not come
        self.new: list[DecodingRequest] = []  # their prompts are read next
        self.rows: list[DecodingRequest] = []  # they have a token or more
        self._ended: list[tuple[DecodingRequest, Generation | Exception]] = []

    @abstractmethod
    def advance(self, turn_ends: Callable[[int], bool]) -> None:
        """Read the new prompts, then give each row a token in a pass, or in more passes until `turn_ends(passes)`."""

    @abstractmethod
    def clear(self) -> None:
        """Forget what the model has read, after an error."""

    def has_room(self, row: DecodingRequest, running: Sequence[DecodingRequest]) -> bool:
        """Whether the request `row` can be answered beside the `running` ones."""
        return len(running) < row.most

    def next(self) -> DecodingRequest | None:
        """Return, but leave waiting, a request of the scope with fewest running; None if none, or the group is full."""
        running = [*self.rows, *self.new]
        busy = Counter(row.scope for row in running)
        row = min(self.waiting, key=lambda each: busy[each.scope], default=None)
        return row if row is not None and self.has_room(row, running) else None

    def admit(self) -> None:
        """Move waiting requests to the new ones while there is room."""
        while (row := self.next()) is not None:
            self.waiting.remove(row)
            if not row.canceled.is_set():
                self.new.append(row)

    def take(self, rows: Sequence[DecodingRequest], scores: Any) -> list[bool]:
        """Choose rows' tokens by scores (rows, vocabulary), of torch or NumPy; return for each row if it goes on."""
        going = []
        for row, own, likeliest in zip(rows, scores, scores.argmax(-1).tolist(), strict=True):
            answer: Generation | Exception | None
            try:
                answer = None if row.canceled.is_set() else row.answering.take(own, likeliest)
            except Exception as error:  # from this row alone: its schema, or its caller's code
                answer = error
            if answer is not None:
                self._ended.append((row, answer))
            going.append(answer is None and not row.canceled.is_set())
        return going

    def hand_out(self) -> None:
        """Give callers, once, the answers and errors that have ended; canceled requests get none."""
        ended, self._ended = self._ended, []
        for row, answer in ended:
            row.deliver(answer)

    def fail(self, error: BaseException) -> None:
        """Give an error to the callers of all requests that are being answered."""
        self.hand_out()
        failed, self.rows, self.new = [*self.rows, *self.new], [], []
        self.clear()
        for row in failed:
            row.deliver(error)


class DecodingScheduler:
    """A queue of requests from any thread, which one other thread answers; `group` makes one model's DecodingGroup."""

    def __init__(self, group: Callable[[Any], DecodingGroup]) -> None:
        self._changed = threading.Condition()
        self._group = group
        self._groups: dict[Any, DecodingGroup] = {}
        self._running = self._closed = False

    def add(self, requests: Iterable[DecodingRequest]) -> None:
        """Add requests, whose answers go to their `put`; raise ConfigError after `close`."""
        with self._changed:
            self.check_open()
            for group in self._groups.values():  # the prompts of canceled rows would stay in memory until their turn
                group.waiting = [row for row in group.waiting if not row.canceled.is_set()]
            for row in requests:
                if row.read_by not in self._groups:
                    self._groups[row.read_by] = self._group(row.read_by)
                self._groups[row.read_by].waiting.append(row)
            if not self._running:
                self._running = True
                thread = threading.Thread(target=self._run, name="ctx-compress-answers", daemon=True)
                _WORKERS.add(thread)
                thread.start()

    def check_open(self) -> None:
        if self._closed:
            raise _closed()

    def close(self) -> None:
        """End running and waiting requests with an error, and accept no more."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._groups = {key: group for key, group in self._groups.items() if group.waiting or group.rows}
                groups = list(self._groups.values())
                if not groups or self._closed or _ENDING.is_set():
                    for group in groups if self._closed else ():
                        group.new, group.waiting = group.waiting, []
                        group.fail(_closed())
                    self._running = False
                    self._changed.notify_all()
                    return
            for group in groups:
                try:
                    with self._changed:
                        group.admit()
                    group.advance(partial(self._turn_ends, group))
                    # Only after the model is restored: the caller who gets the last answer may inspect the model.
                    group.hand_out()
                except BaseException as error:
                    group.fail(error)

    def _turn_ends(self, group: DecodingGroup, passes: int) -> bool:
        """Whether a group's turn ends, because another group waits or a new request could be answered now."""
        with self._changed:
            others = [other for other in self._groups.values() if other is not group]
            wanted = group.next() is not None or any(other.waiting and not other.rows for other in others)
            return wanted or self._closed or _ENDING.is_set() or bool(others and passes >= _STEPS)


def _closed() -> ConfigError:
    return ConfigError("this engine is closed: make a new one")


@atexit.register
def _end() -> None:
    """Stop answering when the program ends; a thread that Python ends inside native code would abort the process."""
    _ENDING.set()
    for thread in list(_WORKERS):
        thread.join(_END_SECONDS)  # a thread that waits for a decoder which the caller still holds never ends
    _ENDING.clear()
