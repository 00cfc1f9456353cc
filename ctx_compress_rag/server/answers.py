"""Await a decoder's answers in an event loop, and cancel them when the client disconnects."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.prompt import PromptLike
from ctx_compress_rag.server.faults import RequestError
from ctx_compress_rag.server.metrics import ServerMetrics

T = TypeVar("T")
Pieces = AsyncGenerator[str | Generation, None]


async def stream_answer(decoder: Decoder, prompt: PromptLike, sampling: Sampling, metrics: ServerMetrics) -> Pieces:
    """Yield a prompt's answer piece by piece, then the whole Generation; count time and tokens in `metrics`."""
    began, first = time.perf_counter(), True
    async with aclosing(await decoder.astream(prompt, sampling)) as pieces:
        async for piece in pieces:
            if first:
                metrics.first_token.observe(time.perf_counter() - began)
                first = False
            if isinstance(piece, Generation):
                metrics.count(piece)
            yield piece


async def gather_answers(answers: Sequence[Pieces]) -> list[Generation]:
    """Return the answers, which are read to their ends at the same time; if one fails, cancel all."""

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


async def unless_client_gone(receive: Callable[[], Awaitable[Any]], work: Awaitable[T]) -> T:
    """Return the result of `work`; if the client disconnects first, cancel `work` and raise RequestError."""

    async def gone() -> None:  # `receive` is ASGI's, after the body was read: the next message is the disconnect
        while (await receive())["type"] != "http.disconnect":
            pass

    watch, task = asyncio.ensure_future(gone()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({watch, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError(499, "the client has gone")  # nobody reads it; nginx's status, for the metrics
        return task.result()
    finally:
        for each in (watch, task):
            each.cancel()
        await asyncio.gather(watch, task, return_exceptions=True)
