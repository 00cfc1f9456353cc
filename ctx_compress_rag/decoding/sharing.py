"""Concurrent calls share forward passes: one thread runs the model for all waiting callers."""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from ctx_compress_rag.decoding.rows import Row, Rows
from ctx_compress_rag.errors import DecoderMemoryError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.prompt import Prompt

_TOGETHER_SECONDS = 0.05  # the longest that the first caller waits for others whose prompts are being prepared
_STEPS = 8  # passes of one group before the next group's turn
_END_SECONDS = 30
_PADDING = 1.5  # a batch's positions, padding included, are at most this many times its prompts' own


@dataclass
class _Group:
    """Rows that one model answers, and rows that wait for it."""

    rows: Rows = field(default_factory=Rows)
    waiting: deque[tuple[Row, int]] = field(default_factory=deque)


class Sharing:
    """The calls of one backbone, from any decoder, framework or thread.

    A thread runs the model while there is something to answer, and then ends. Between passes it takes in new
    prompts and lets other threads that wait for the model have it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: dict[Any, _Group] = {}
        self._reading = 0
        self._running = False

    @classmethod
    def of(cls, backbone: Backbone) -> Sharing:
        """The backbone's Sharing, made on first use."""
        with _MAKING:
            return _OF.setdefault(backbone, cls())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Mark prompts as being prepared: callers whose prompts are ready wait a moment, to start together."""
        with self._changed:
            self._reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    def add(self, rows: Sequence[Row], key: Any, most: int) -> None:
        """Answer rows; each gets its answer through its `put`.

        Args:
            rows: what to answer.
            key: rows with the same key are read by the same model.
            most: most rows in one pass.
        """
        with self._changed:
            group = self._groups.setdefault(key, _Group())
            # Drop cancelled rows: their prompts would stay in memory until their turn.
            group.waiting = deque(each for each in group.waiting if not each[0].cancelled)
            group.waiting.extend((row, most) for row in rows)
            if not self._running:
                self._running = True
                thread = threading.Thread(target=self._run, name="ctx-compress-stream", daemon=True)
                _THREADS.add(thread)
                thread.start()

    def _run(self) -> None:
        until = time.monotonic() + _TOGETHER_SECONDS
        with self._changed:
            while self._reading and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
        while True:
            with self._changed:
                self._groups = {key: group for key, group in self._groups.items() if group.waiting or group.rows.rows}
                groups = list(self._groups.values())
                if not groups or _ENDING.is_set():
                    self._running = False
                    return
            for group in groups:
                try:
                    self._admit(group)
                    self._advance(group, alone=len(groups) == 1)
                    # Only after the model is restored: the caller who gets the last answer may inspect the model.
                    group.rows.hand_out()
                except BaseException as error:
                    group.rows.hand_out()
                    rows, group.rows = group.rows.rows, Rows()
                    _tell(rows, error)

    def _admit(self, group: _Group) -> None:
        new: list[Row] = []
        with self._changed:
            while group.waiting and len(group.rows.rows) + len(new) < group.waiting[0][1]:
                row = _next(group, new)
                if not row.cancelled:
                    new.append(row)
        for batch in _alike(new):
            try:
                group.rows.join(batch)
            except Exception as error:
                if len(batch) == 1:
                    _tell(batch, error)
                    continue
                del error
                for row in batch:  # one of them caused the error, or together they need too much memory
                    row.ids.clear()
                    try:
                        group.rows.join([row])
                    except Exception as own:
                        _tell([row], own)

    def _advance(self, group: _Group, alone: bool) -> None:
        """Run passes until the group's rows have ended, or someone else wants the model."""
        if not group.rows.rows:
            return
        first = group.rows.rows[0]
        with first.opened(torch.zeros(1, 1, dtype=torch.bool)) as model:
            steps = 0
            while group.rows.rows:
                group.rows.hand_out()
                group.rows.step(model)
                steps += 1
                if not alone and steps >= _STEPS:
                    return
                if _ENDING.is_set() or first.bundle.backbone.lock.waiting or self._others(group):
                    return

    def _others(self, group: _Group) -> bool:
        """Whether a waiting row could be answered now."""
        with self._changed:
            if group.waiting and len(group.rows.rows) < group.waiting[0][1]:
                return True
            return any(other.waiting and not other.rows.rows for other in self._groups.values() if other is not group)


_OF: WeakKeyDictionary[Backbone, Sharing] = WeakKeyDictionary()
_MAKING = threading.Lock()
_THREADS: WeakSet[threading.Thread] = WeakSet()
_ENDING = threading.Event()


@atexit.register
def _end() -> None:
    """Stop answering when the program ends: if Python ends a thread inside torch, the process aborts."""
    _ENDING.set()
    for thread in list(_THREADS):
        thread.join(_END_SECONDS)  # a thread that waits for a decoder which the caller still holds never ends
    _ENDING.clear()


def _next(group: _Group, new: Sequence[Row]) -> Row:
    """Take the next row: the first to arrive from the scope with the fewest running rows."""
    busy = Counter(row.scope for row in (*group.rows.rows, *new))
    place, (row, _) = min(enumerate(group.waiting), key=lambda each: busy[each[1][0].scope])
    del group.waiting[place]
    return row


def _alike(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows in batches of similar length."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: row.prompt.length):
        length = row.prompt.length
        own = sum(each.prompt.length for each in batch) + length
        if batch and length * (len(batch) + 1) > _PADDING * own:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _tell(rows: Sequence[Row], error: BaseException) -> None:
    for row in rows:
        row.give(memory_error([row.prompt for row in rows], str(error)) if out_of_memory(error) else error)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means too little memory: torch's CPU allocator and MPS raise a RuntimeError."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ("allocate memory" in said or "out of memory" in said)
    )


def memory_error(prompts: Sequence[Prompt], said: str) -> DecoderMemoryError:
    """Make the error to show. The allocator's error is not its cause, as its frames would keep their memory.

    Args:
        prompts: the prompts of the batch.
        said: the allocator's message.
    """
    longest = max(prompt.length for prompt in prompts)
    return DecoderMemoryError(
        f"not enough memory for a batch of {len(prompts)} prompts, the longest of {longest} tokens "
        f"({said.partition(chr(10))[0]}): use a coarser ratio, fewer passages, a shorter answer or a smaller batch_size"
    )
