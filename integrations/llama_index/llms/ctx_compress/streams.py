"""Run a blocking generator in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_END = object()


async def in_thread(blocking: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Iterate over a blocking generator in a thread; the event loop keeps running meanwhile.

    One thread runs all of it, so that a consumer that stops early, or is canceled while the thread waits for
    the next item, can close the generator after that item.
    """
    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="ctx-compress-async")
    try:
        while True:
            item: Any = await loop.run_in_executor(thread, next, blocking, _END)
            if item is _END:
                return
            yield item
    finally:
        thread.submit(blocking.close)
        thread.shutdown(wait=False)
