"""Replies in OpenAI's formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ctx_compress_rag.decoding.logprobs import as_openai, as_openai_completion
from ctx_compress_rag.decoding.sampling import Generation

Kind = Literal["chat", "text"]

DONE = "data: [DONE]\n\n"
_CHUNK = {"chat": "chat.completion.chunk", "text": "text_completion"}
_WHOLE = {"chat": "chat.completion", "text": "text_completion"}


def usage(answers: Sequence[Generation]) -> dict[str, int]:
    """Tokens of prompts and answers. A slot counts as one token; `slots` is the number of slots."""
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "slots": sum(answer.slots for answer in answers),
    }


def whole(kind: Kind, head: dict[str, Any], answers: Sequence[Generation]) -> dict[str, Any]:
    """A reply with all of the answers; `head` has id, model and time."""
    choices = [
        {
            "index": index,
            **_text(kind, answer.text, "message"),
            "finish_reason": answer.finish_reason,
            "logprobs": _logprobs(kind, answer),
        }
        for index, answer in enumerate(answers)
    ]
    return {**head, "object": _WHOLE[kind], "choices": choices, "usage": usage(answers)}


def chunk(kind: Kind, head: dict[str, Any], text: str, first: bool = False, ended: Generation | None = None) -> str:
    """A server-sent event with a piece of the answer; or, once it ended, with the reason and all log-probabilities."""
    shown = {"delta": {}} if kind == "chat" and ended else _text(kind, text, "delta")
    if kind == "chat" and not first:
        shown["delta"].pop("role", None)
    reason = None if ended is None else ended.finish_reason
    logprobs = None if ended is None else _logprobs(kind, ended)
    choice = {"index": 0, **shown, "finish_reason": reason, "logprobs": logprobs}
    return event({**head, "object": _CHUNK[kind], "choices": [choice]})


def last_chunk(kind: Kind, head: dict[str, Any], answer: Generation) -> str:
    """The server-sent event with the token counts."""
    return event({**head, "object": _CHUNK[kind], "choices": [], "usage": usage([answer])})


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _text(kind: Kind, text: str, part: str) -> dict[str, Any]:
    return {part: {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}


def _logprobs(kind: Kind, answer: Generation) -> Mapping[str, Any] | None:
    shape = as_openai if kind == "chat" else as_openai_completion
    return None if answer.logprobs is None else shape(answer.logprobs)
