"""Convert LangChain messages for a decoder's chat template, and parse answers that are JSON."""

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.text.chat import THOUGHTS


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """Return the role and text of each message, in order; raise ConfigError for anything but text."""
    if not messages:
        raise ConfigError("there are no messages to answer: give at least one")
    return [{"role": _role(message), "content": _text(message)} for message in messages]


def parsed(schema: dict[str, Any] | type, message: AIMessage) -> Any:
    """Return an answer's JSON as an object of `schema` or as plain values; raise OutputParserException for cut JSON."""
    text = message.text
    if message.response_metadata.get("finish_reason") == "length":
        raise OutputParserException(f"the JSON was cut at max_tokens: give a larger one; so far it is {text!r}", text)
    try:
        said = json.loads(text)
        # The second is that of pydantic 1's classes; other schemas have neither.
        made: Any = getattr(schema, "model_validate", None) or getattr(schema, "parse_obj", None)
        return said if made is None else made(said)
    except ValueError as error:  # pydantic's too
        raise OutputParserException(f"the answer does not fit the schema ({error}): {text!r}", text) from error


def parsed_with_raw(schema: dict[str, Any] | type, message: AIMessage) -> dict[str, Any]:
    """Return the message, with what `parsed` returns or raises for it."""
    try:
        return {"raw": message, "parsed": parsed(schema, message), "parsing_error": None}
    except OutputParserException as error:
        return {"raw": message, "parsed": None, "parsing_error": error}


def _role(message: BaseMessage) -> str:
    match message:
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case SystemMessage():
            return "system"
        case ChatMessage():
            return message.role
    raise ConfigError(f"cannot read a message of type {message.type!r}: give human, ai, system or chat messages")


def _text(message: BaseMessage) -> str:
    for block in message.content:
        if isinstance(block, str) or (isinstance(message, AIMessage) and block.get("type") in THOUGHTS):
            continue
        if block.get("type") != "text":
            raise ConfigError(f"cannot read a content block of type {block.get('type')!r}: the decoder reads only text")
    return str(message.text)
