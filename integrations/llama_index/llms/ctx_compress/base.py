"""The LLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.decoders.transformers import Generation, Message, Sampling, TransformersDecoder
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.stores import SoftContextStore
from llama_index.llms.ctx_compress.streams import in_thread

_ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.DEVELOPER: "system",
}

Prompt = str | list[Message]
Pieces = Iterator[str | Generation]


class CompressedContextLLM(LLM):
    """The decoder of a store's bundle: reads prompts in which markers stand for stored passages.

    Where the tokenizer has a chat template this is a chat model, and a completion prompt becomes one user
    message unless it is `formatted`. Where it has none, `messages_to_prompt` and `completion_to_prompt` make
    plain prompts. Prompts without markers are answered by the bundle's full-text decoder. The async methods
    run in threads: the event loop goes on.

    The sampling fields may also be given to each call: `llm.complete(prompt, max_tokens=10, stop=["END"])`.

    Attributes:
        store: where the soft contexts are, and with it the bundle and its decoder.
        max_tokens: the most tokens of an answer.
        temperature: 0 takes the likeliest token each time.
        top_p: sample from the likeliest tokens of this total probability.
        top_k: sample from so many likeliest tokens; 0 from all.
        stop: an answer ends before any of these strings.
        seed: makes sampling repeatable.
        on_missing: where a marker's slots cannot be read: raise an "error", or read the passage's "text".

    Raises:
        ConfigError: a call has an unknown argument, or a message holds something other than text.
        MissingPassageError: a marker's passage was deleted or its text changed.
    """

    model_config = ConfigDict(extra="forbid")

    store: SoftContextStore = Field(exclude=True, repr=False)
    max_tokens: int = Sampling.max_new_tokens
    temperature: float = Sampling.temperature
    top_p: float = Sampling.top_p
    top_k: int = Sampling.top_k
    stop: list[str] = Field(default_factory=list)
    seed: int | None = None
    on_missing: Literal["error", "text"] = "error"

    _decoder: TransformersDecoder = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Open the decoder, and refuse impossible sampling settings."""
        super().model_post_init(context)
        self._sampling({})
        self._decoder = TransformersDecoder(self._bundle, self.store, on_missing=self.on_missing)

    @classmethod
    def class_name(cls) -> str:
        """The class's name, for serialisation."""
        return "CompressedContextLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Sizes and name of the decoder."""
        bundle = self._bundle
        config = bundle.backbone.model.config.get_text_config()
        return LLMMetadata(
            context_window=getattr(config, "max_position_embeddings", DEFAULT_CONTEXT_WINDOW),
            num_output=self.max_tokens,
            is_chat_model=self._templated,
            model_name=bundle.config.decoder or bundle.config.name,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt."""
        return _completion(self._generate(self._from_text(prompt, formatted), kwargs))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return _chat(_completion(self._generate(self._from_messages(messages), kwargs)))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt in a thread."""
        return _completion(await asyncio.to_thread(self._generate, self._from_text(prompt, formatted), kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation in a thread."""
        return _chat(_completion(await asyncio.to_thread(self._generate, self._from_messages(messages), kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt piece by piece; the last response has an empty delta and the token counts."""
        return _completions(self._stream(self._from_text(prompt, formatted), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece; the last response has an empty delta and the token counts."""
        return _chats(self._stream(self._from_messages(messages), kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """`stream_complete` in a thread."""
        pieces = await asyncio.to_thread(self._stream, self._from_text(prompt, formatted), kwargs)
        return in_thread(_completions(pieces))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """`stream_chat` in a thread."""
        pieces = await asyncio.to_thread(self._stream, self._from_messages(messages), kwargs)
        return in_thread(_chats(pieces))

    @property
    def _bundle(self) -> Bundle:
        return cast(Bundle, self.store.bundle)

    @property
    def _templated(self) -> bool:
        return self._bundle.tokenizer.chat_template is not None

    def _from_text(self, prompt: str, formatted: bool) -> Prompt:
        if formatted:
            return prompt
        if self._templated:
            return [{"role": "user", "content": prompt}]
        assert self.completion_to_prompt is not None  # the base class sets a default
        return self.completion_to_prompt(prompt)

    def _from_messages(self, messages: Sequence[ChatMessage]) -> Prompt:
        for message in messages:
            for block in message.blocks:
                if not isinstance(block, TextBlock):
                    raise ConfigError(f"a message holds a {block.block_type} block: this LLM reads text only")
        if not self._templated:
            assert self.messages_to_prompt is not None  # the base class sets a default
            return self.messages_to_prompt(messages)
        return [{"role": _ROLES.get(m.role, m.role.value), "content": m.content or ""} for m in messages]

    def _sampling(self, given: dict[str, Any]) -> Sampling:
        known = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")}
        unknown = sorted(given.keys() - known.keys())
        if unknown:
            raise ConfigError(f"unknown argument {unknown[0]!r}: a call takes {', '.join(known)}")
        chosen = {**known, **{name: value for name, value in given.items() if value is not None}}
        stop = chosen.pop("stop")
        return Sampling(
            max_new_tokens=chosen.pop("max_tokens"), stop=(stop,) if isinstance(stop, str) else tuple(stop), **chosen
        )

    def _generate(self, prompt: Prompt, given: dict[str, Any]) -> Generation:
        return self._decoder.generate([prompt], self._sampling(given))[0]

    def _stream(self, prompt: Prompt, given: dict[str, Any]) -> Pieces:
        return self._decoder.stream(prompt, self._sampling(given))


def _completions(pieces: Pieces) -> CompletionResponseGen:
    text = ""
    for piece in pieces:
        if isinstance(piece, Generation):
            yield _completion(piece, delta="")
        else:
            text += piece
            yield CompletionResponse(text=text, delta=piece)


def _chats(pieces: Pieces) -> ChatResponseGen:
    for response in _completions(pieces):
        yield _chat(response)


def _completion(generation: Generation, delta: str | None = None) -> CompletionResponse:
    usage = {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
        "total_tokens": generation.prompt_tokens + generation.completion_tokens,
    }
    raw = {"usage": usage, "slots": generation.slots, "finish_reason": generation.finish_reason}
    return CompletionResponse(text=generation.text, delta=delta, raw=raw, additional_kwargs=usage)


def _chat(response: CompletionResponse) -> ChatResponse:
    # The counts go with the response, not into the message: LlamaIndex would show a message's to the LLM.
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )
