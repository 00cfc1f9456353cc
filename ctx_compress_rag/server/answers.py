"""Get the decoder's answers in an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing, nullcontext, suppress
from typing import Any, TypeVar

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.prompt import PromptLike
from ctx_compress_rag.server.metrics import Metrics
from ctx_compress_rag.store.marker import scope as in_scope

T = TypeVar("T")
Pieces = AsyncGenerator[str | Generation, None]


class ClientGoneError(Exception):
    """The client has disconnected."""


async def answer(
    decoder: Decoder, prompt: PromptLike, sampling: Sampling, scope: str | None, threads: Executor, metrics: Metrics
) -> Pieces:
    """Yield a prompt's answer piece by piece, then the whole Generation.

    If closed early or canceled, generation stops after the token in progress. `scope` is whose markers are read (None
    for the store's own); `threads` read the prompt.
    """
    loop, began, first = asyncio.get_running_loop(), time.perf_counter(), True
    pieces: asyncio.Queue[str | Generation | BaseException] = asyncio.Queue()

    def put(piece: str | Generation | BaseException) -> None:
        with suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    def begin() -> Callable[[], None]:
        with nullcontext() if scope is None else in_scope(scope):
            return decoder.start(prompt, sampling, put)

    begun = loop.run_in_executor(threads, begin)
    try:
        await asyncio.shield(begun)
        while not isinstance(piece := await pieces.get(), BaseException):
            if first:
                metrics.first_token.observe(time.perf_counter() - began)
                first = False
            if isinstance(piece, Generation):
                metrics.count(piece)
                yield piece
                return
            yield piece
        raise piece
    finally:
        begun.add_done_callback(_cancel)


async def whole(answers: Sequence[Pieces]) -> list[Generation]:
    """The answers, read to their ends at the same time; if one fails, all are canceled."""

    async def last(pieces: Pieces) -> Generation:
        async with aclosing(pieces):
            *_, done = [piece async for piece in pieces]
        assert isinstance(done, Generation)
        return done

    tasks = [asyncio.ensure_future(last(pieces)) for pieces in answers]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # one has failed, or the client has disconnected
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(receive: Callable[[], Awaitable[Any]], work: Awaitable[T]) -> T:
    """Return what `work` gives; cancel it and raise ClientGoneError if the client disconnects first.

    `receive` is ASGI's, after the body was read: the next message is the disconnect.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watch, task = asyncio.ensure_future(gone()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({watch, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (watch, task):
            each.cancel()
        await asyncio.gather(watch, task, return_exceptions=True)


def _cancel(begun: asyncio.Future[Callable[[], None]]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.result()()
