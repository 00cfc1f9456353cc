"""Answers to several prompts, which end in any order, collected in the order of the prompts."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue

from ctx_compress_rag.decoding.generation import Generation, Put


class Answers:
    """Collects the answers to `count` prompts."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._queue: SimpleQueue[tuple[int, str | Generation | BaseException]] = SimpleQueue()

    def of(self, index: int) -> Put:
        """What to call with the answer to the prompt with this index, or with an error; any thread may call it."""
        return partial(self._take, index)

    def wait(self) -> list[Generation]:
        """Wait for all answers.

        Raises: the first error instead of an answer.
        """
        done: dict[int, Generation] = {}
        while len(done) < self._count:
            index, answer = self._queue.get()
            if isinstance(answer, BaseException):
                raise answer
            if isinstance(answer, Generation):
                done[index] = answer
        return [done[index] for index in range(self._count)]

    def _take(self, index: int, answer: str | Generation | BaseException) -> None:
        self._queue.put((index, answer))
