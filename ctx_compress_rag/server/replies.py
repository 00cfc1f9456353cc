"""Await a decoder's answers, cancel them when the client disconnects, and write replies in OpenAI's formats."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, TypeVar

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling, openai_chat_logprobs, openai_completion_logprobs
from ctx_compress_rag.prompt import PromptLike
from ctx_compress_rag.server.guard import RequestError, ServerMetrics, error_response

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


Kind = Literal["chat", "text"]

_CHUNK = {"chat": "chat.completion.chunk", "text": "text_completion"}
_WHOLE = {"chat": "chat.completion", "text": "text_completion"}


class OpenAIReply:
    """The reply to one request, whole or in chunks; `sources` are the retrieved passages, None if none were sought."""

    def __init__(self, kind: Kind, model: str, sources: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._kind: Kind = kind
        id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self._head: dict[str, Any] = {"id": id, "created": int(time.time()), "model": model}
        self._sources = {} if sources is None else {"sources": sources}

    def whole(self, answers: Sequence[Generation]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._text(answer.text, "message"),
                "finish_reason": answer.finish_reason,
                "logprobs": self._logprobs(answer),
            }
            for index, answer in enumerate(answers)
        ]
        own = {"object": _WHOLE[self._kind], "choices": choices, "usage": openai_usage(answers)}
        return {**self._head, **self._sources, **own}

    async def events(
        self, first: str | Generation, rest: AsyncGenerator[str | Generation, None], count: bool
    ) -> AsyncIterator[str]:
        """Yield an answer's pieces as server-sent events, then its log-probabilities and, if `count`, its usage."""
        async with aclosing(rest):
            try:
                done = first
                yield self._chunk(first if isinstance(first, str) else "", begins=True)
                async for piece in rest:
                    done = piece
                    if isinstance(piece, str):
                        yield self._chunk(piece)
                assert isinstance(done, Generation)
                yield self._chunk("", ended=done)
                if count:
                    yield _event(
                        {**self._head, "object": _CHUNK[self._kind], "choices": [], "usage": openai_usage([done])}
                    )
                yield "data: [DONE]\n\n"
            except Exception as error:
                yield _event(error_response(error)[1])

    def _chunk(self, text: str, begins: bool = False, ended: Generation | None = None) -> str:
        shown = {"delta": {}} if self._kind == "chat" and ended else self._text(text, "delta")
        if self._kind == "chat" and not begins:
            shown["delta"].pop("role", None)
        reason = None if ended is None else ended.finish_reason
        logprobs = None if ended is None else self._logprobs(ended)
        choice = {"index": 0, **shown, "finish_reason": reason, "logprobs": logprobs}
        sources = self._sources if begins else {}
        return _event({**self._head, **sources, "object": _CHUNK[self._kind], "choices": [choice]})

    def _text(self, text: str, part: str) -> dict[str, Any]:
        return {part: {"role": "assistant", "content": text}} if self._kind == "chat" else {"text": text}

    def _logprobs(self, answer: Generation) -> Mapping[str, Any] | None:
        shape = openai_chat_logprobs if self._kind == "chat" else openai_completion_logprobs
        return None if answer.logprobs is None else shape(answer.logprobs)


def openai_usage(answers: Sequence[Generation]) -> dict[str, int]:
    """Return the numbers of tokens of prompts and answers. A slot counts as one token; `slots` counts only slots."""
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "slots": sum(answer.slots for answer in answers),
    }


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
