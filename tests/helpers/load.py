"""Clients at a time against a server: chats whole and streamed, raw prompts, passages to compress."""

import time
from asyncio import gather
from collections import defaultdict
from itertools import count
from typing import Any

import httpx
import openai

PASSAGES = [f"Orla number {n} kept {n} bees in Pellmouth, by the old mill on the river." for n in range(32)]
QUESTION = "Who kept bees?"
KINDS = ("chat", "stream", "text", "compress")


async def load(url: str, model: str, clients: int, seconds: float, key: str) -> None:
    """Ask until the time is over; every client waits for its answer before it asks again.

    Raises what a request that is not answered raises. The same question has the same answer, as decoding is greedy.
    """
    said: dict[tuple[str, int], set[str]] = defaultdict(set)
    http = httpx.AsyncClient(limits=httpx.Limits(max_connections=clients), timeout=300)
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http) as client:
        markers = await compressed(client, PASSAGES)
        until = time.monotonic() + seconds

        async def ask(number: int) -> None:
            for turn in count(number):
                if time.monotonic() > until:
                    return
                kind, place = KINDS[turn % 4], turn % len(markers)
                said[kind.replace("stream", "chat"), place].add(await one(kind, place))

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
    assert {kind for kind, _ in said} == {"chat", "text", "compress"}
    assert all(len(texts) == 1 for texts in said.values())


async def compressed(client: openai.AsyncOpenAI, texts: list[str]) -> list[str]:
    reply: Any = await client.post("/compress", body={"input": texts}, cast_to=object)
    return [item["text"] for item in reply["data"]]
