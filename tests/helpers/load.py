"""Clients at a time against a server: chats whole and streamed, raw prompts, passages to compress.

`PYTHONPATH=tests python tests/helpers/load.py http://127.0.0.1:8000/v1 demo 64 120` asks one that runs.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import openai

PASSAGES = [f"Orla number {n} kept {n} bees in Pellmouth, by the old mill on the river." for n in range(32)]
QUESTION = "Who kept bees?"
_WAIT = 300


@dataclass
class Load:
    """What came of it.

    Attributes:
        answered: requests of each kind that were answered.
        failed: what each request that was not answered raised.
        texts: the different answers to each question; one each, as decoding is greedy.
        first: seconds to the first piece of each stream.
    """

    answered: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    texts: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)

    def check(self, clients: int) -> None:
        """None was dropped, all kinds were asked, and the same question had the same answer."""
        assert self.failed == []
        assert set(self.answered) == {"chat", "stream", "text", "compress"}
        assert self.answered.total() >= clients
        assert all(len(texts) == 1 for texts in self.texts.values())


async def load(url: str, model: str, clients: int, seconds: float, key: str = "none", tokens: int = 8) -> Load:
    """Ask until the time is over; every client waits for its answer before it asks again."""
    made = Load()
    limits = httpx.Limits(max_connections=clients)
    http = httpx.AsyncClient(limits=limits, timeout=_WAIT)
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http) as client:
        markers = await compressed(client, PASSAGES)
        until = time.monotonic() + seconds

        async def ask(number: int) -> None:
            for turn in count(number):
                if time.monotonic() > until:
                    return
                kind = ("chat", "stream", "text", "compress")[turn % 4]
                try:
                    await one(kind, turn % len(markers))
                    made.answered[kind] += 1
                except Exception as error:
                    made.failed.append(f"{kind}: {error!r} after {error.__cause__!r}")

        async def one(kind: str, place: int) -> None:
            chat: list[Any] = [{"role": "user", "content": f"{markers[place]} {QUESTION}"}]
            if kind == "compress":
                text = (await compressed(client, [PASSAGES[place]]))[0]
                assert "[[ctx:" in text
                return
            if kind == "text":
                reply = await client.completions.create(model=model, prompt=PASSAGES[place], max_tokens=tokens)
                text = reply.choices[0].text
            elif kind == "chat":
                whole = await client.chat.completions.create(model=model, messages=chat, max_tokens=tokens)
                text = whole.choices[0].message.content or ""
            else:
                began, pieces = time.monotonic(), []
                opened = await client.chat.completions.create(
                    model=model, messages=chat, max_tokens=tokens, stream=True
                )
                async for chunk in opened:
                    if not pieces:
                        made.first.append(time.monotonic() - began)
                    pieces.append(chunk.choices[0].delta.content or "")
                text = "".join(pieces)
            asked = "text" if kind == "text" else "chat"
            made.texts.setdefault((asked, place), set()).add(text)

        await asyncio.gather(*map(ask, range(clients)))
    return made


async def compressed(client: openai.AsyncOpenAI, texts: list[str]) -> list[str]:
    reply: Any = await client.post("/compress", body={"input": texts}, cast_to=object)
    return [item["text"] for item in reply["data"]]


if __name__ == "__main__":
    address, model, clients, seconds = sys.argv[1:5]
    began = time.monotonic()
    found = asyncio.run(load(address, model, int(clients), float(seconds)))
    odd = sum(len(texts) > 1 for texts in found.texts.values())
    waits = sorted(found.first)
    print(f"{clients} clients, {time.monotonic() - began:.0f} s: {dict(found.answered)}, {len(found.failed)} failed")
    print(f"prompts with more than one answer: {odd}; first piece, median {waits[len(waits) // 2]:.2f} s")
    for said, times in Counter(found.failed).most_common(5):
        print(f"{times} times {said}")
