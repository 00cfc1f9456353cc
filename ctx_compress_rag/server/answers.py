"""Get the decoder's answers in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.prompt import PromptLike
from ctx_compress_rag.store.marker import scope as in_scope

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has disconnected."""


async def answer(
    decoder: Decoder, prompt: PromptLike, sampling: Sampling, scope: str | None, threads: Executor
) -> AsyncGenerator[str | Generation, None]:
    """Yield a prompt's answer piece by piece, then the whole Generation.

    If closed early or canceled, generation stops after the token in progress. `scope` is whose markers are read (None
    for the store's own); `threads` read the prompt.
    """
    loop = asyncio.get_running_loop()
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
        while isinstance(piece := await pieces.get(), str):
            yield piece
        if isinstance(piece, BaseException):
            raise piece
        yield piece
    finally:
        begun.add_done_callback(_cancel)


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
