"""Clients at a time against a server: chats whole and streamed, raw prompts, passages to compress."""

from __future__ import annotations

import time
from asyncio import gather
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import openai

PASSAGES = [f"Orla number {n} kept {n} bees in Pellmouth, by the old mill on the river." for n in range(32)]
QUESTION = "Who kept bees?"
KINDS = ("chat", "stream", "text", "compress")


@dataclass
class Load:
    """What came of it.

    Attributes:
        answered: requests of each kind that were answered.
        failed: what each request that was not answered raised.
        texts: the different answers to each question; one each, as decoding is greedy.
    """

    answered: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    texts: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def check(self, clients: int) -> None:
        """None was dropped, all kinds were asked, and the same question had the same answer."""
        assert self.failed == []
        assert set(self.answered) == set(KINDS)
        assert self.answered.total() >= clients
        assert all(len(texts) == 1 for texts in self.texts.values())


async def load(url: str, model: str, clients: int, seconds: float, key: str) -> Load:
    """Ask until the time is over; every client waits for its answer before it asks again."""
    made = Load()
    http = httpx.AsyncClient(limits=httpx.Limits(max_connections=clients), timeout=300)
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http) as client:
        markers = await compressed(client, PASSAGES)
        until = time.monotonic() + seconds

        async def ask(number: int) -> None:
            for turn in count(number):
                if time.monotonic() > until:
                    return
                kind, place = KINDS[turn % 4], turn % len(markers)
                try:
                    text = await one(kind, place)
                    made.texts.setdefault(("chat" if kind == "stream" else kind, place), set()).add(text)
                    made.answered[kind] += 1
                except Exception as error:
                    made.failed.append(f"{kind}: {error!r} after {error.__cause__!r}")

        async def one(kind: str, place: int) -> str:
            asked: dict[str, Any] = {"model": model, "max_tokens": 8}
            chat: list[Any] = [{"role": "user", "content": f"{markers[place]} {QUESTION}"}]
            match kind:
                case "compress":
                    return (await compressed(client, [PASSAGES[place]]))[0]
                case "text":
                    return str((await client.completions.create(prompt=PASSAGES[place], **asked)).choices[0].text)
                case "chat":
                    whole: Any = await client.chat.completions.create(messages=chat, **asked)
                    return whole.choices[0].message.content or ""
            stream: Any = await client.chat.completions.create(messages=chat, stream=True, **asked)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        await gather(*map(ask, range(clients)))
    return made


async def compressed(client: openai.AsyncOpenAI, texts: list[str]) -> list[str]:
    reply: Any = await client.post("/compress", body={"input": texts}, cast_to=object)
    return [item["text"] for item in reply["data"]]
