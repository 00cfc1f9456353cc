"""From LangChain messages to what a decoder's chat template reads."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage

from ctx_compress_rag.errors import ConfigError


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """Role and text of each message, in order.

    Raises:
        ConfigError: there are none, or one is of a kind, or has a part, that a text decoder cannot read.
    """
    if not messages:
        raise ConfigError("there are no messages to answer: give at least one")
    return [{"role": _role(message), "content": _text(message)} for message in messages]


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
    content = message.content
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        else:
            raise ConfigError(f"cannot read a content block of type {block.get('type')!r}: the decoder reads only text")
    return "".join(texts)
