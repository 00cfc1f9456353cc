"""Define the LLM class, find the JSON schemas of answers that LlamaIndex parses, and count tokens with markers."""

import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, Self, TypeVar, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from llama_index.core.memory import Memory
from llama_index.core.output_parsers import PydanticOutputParser, SelectionOutputParser
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate
from llama_index.core.prompts.prompt_type import PromptType
from llama_index.core.question_gen.output_parser import SubQuestionOutputParser
from llama_index.core.types import Model

from ctx_compress_rag.decoding.preparer import PromptPreparer
from ctx_compress_rag.decoding.sampling import Generation, Sampling, TokenLogprob
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.frameworks import DecoderLLM
from ctx_compress_rag.prompt import Message
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import scope as in_scope

# A small decoder may never end a string or a list by itself, and both have to fit into `max_tokens`.
_MOST_QUESTIONS = 5
_SENTENCE = {"type": "string", "minLength": 1, "maxLength": 120}


def schema_of(prompt: BasePromptTemplate, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema of the answer that a prompt's parser reads; None if the parser reads text.

    Choices and tools come from the template's arguments (`given`), so that an answer cannot name others.
    """
    match prompt.output_parser:
        case SelectionOutputParser():
            return _selection(prompt.metadata.get("prompt_type"), given)
        case SubQuestionOutputParser():
            return _questions(given.get("tools_str"))
        case PydanticOutputParser() as parser:
            schema: dict[str, Any] = parser.output_cls.model_json_schema()
            return schema
    return None


def _selection(kind: object, given: Mapping[str, Any]) -> dict[str, Any]:
    number: dict[str, Any] = {"type": "integer", "minimum": 1}
    choices = given.get("num_choices")
    if isinstance(choices, int):
        number["maximum"] = choices
    most = given.get("max_outputs") or choices if kind == PromptType.MULTI_SELECT else 1
    return _list_of({"choice": number, "reason": _SENTENCE}, most or 1)


def _questions(tools: object) -> dict[str, Any]:
    names = list(json.loads(tools)) if isinstance(tools, str) else []
    name: dict[str, Any] = {"enum": names} if names else {"type": "string"}
    items = _list_of({"sub_question": _SENTENCE, "tool_name": name}, _MOST_QUESTIONS)
    return _object({"items": items})


def _list_of(fields: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": _object(fields), "minItems": 1, "maxItems": most}


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


_ROLES = {MessageRole.CHATBOT: "assistant", MessageRole.MODEL: "assistant", MessageRole.DEVELOPER: "system"}

Prompt = str | list[Message]
T = TypeVar("T")
_Options = dict[str, Any] | None


class CompressedContextLLM(DecoderLLM, LLM):
    """The decoder of a store's bundle, which reads prompts in which markers stand for stored passages.

    If the tokenizer has a chat template, this is a chat model, and a completion prompt becomes one user message unless
    it is `formatted`. If not, `messages_to_prompt` and `completion_to_prompt` make plain prompts. Prompts without
    markers are answered by the bundle's full-text decoder. If a task is canceled or a stream is closed early, the
    decoder stops after the token in progress.

    The options and errors are those of `ctx_compress_rag.frameworks.DecoderLLM`. A call may have options of its
    answer, as in `llm.complete(prompt, max_tokens=10, stop=["END"])`. With `logprobs`, `response.logprobs[i]` has the
    log-probability of token `i` first, then those of the likeliest others at its place.

    Raises ConfigError, too, if a message holds something other than text, or `max_tokens` cut a JSON answer.
    """

    _json: dict[str, Any] = PrivateAttr(default_factory=dict)  # an option of each call, if every answer has to be JSON

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        _ = self.decoder

    def question_prompt(self) -> ChatPromptTemplate:
        """Return the prompt that the store's bundle was trained with, as `text_qa_template` of a query engine."""
        asked = self._question_messages("context_str", "query_str")
        return ChatPromptTemplate([ChatMessage(role=each["role"], content=each["content"]) for each in asked])

    @classmethod
    def class_name(cls) -> str:
        return "CompressedContextLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Return sizes and name of the decoder."""
        bundle = self.store.bundle
        return LLMMetadata(
            context_window=bundle.window or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_tokens,
            is_chat_model=self._templated,
            model_name=bundle.decoder_name or bundle.config.name,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Return the answer to a prompt."""
        return self._generate(self._from_text(prompt, formatted), kwargs)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the answer to a conversation."""
        return _chat(self._generate(self._from_messages(messages), kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Return the answer to a prompt without blocking the event loop."""
        return await self._agenerate(self._from_text(prompt, formatted), kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the answer to a conversation without blocking the event loop."""
        return _chat(await self._agenerate(self._from_messages(messages), kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Yield the answer to a prompt in pieces; the last response has an empty delta and the token counts."""
        return self._stream(self._from_text(prompt, formatted), kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Yield the answer to a conversation in pieces; the last response has an empty delta and the token counts."""
        return (_chat(each) for each in self._stream(self._from_messages(messages), kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Return an asynchronous generator of what `stream_complete` yields."""
        return await self._astream(self._from_text(prompt, formatted), kwargs, lambda response: response)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Return an asynchronous generator of what `stream_chat` yields."""
        return await self._astream(self._from_messages(messages), kwargs, _chat)

    def structured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: _Options = None, **prompt_args: Any
    ) -> Model:
        """Return an object of `output_cls`; tokens that would break its JSON are never chosen.

        Raises MissingExtraError without the extra `json`, and ConfigError if the answer was cut at `max_tokens`.
        """
        held = self._held_to(output_cls.model_json_schema())
        return cast(Model, LLM.structured_predict(held, output_cls, prompt, llm_kwargs, **prompt_args))

    async def astructured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: _Options = None, **prompt_args: Any
    ) -> Model:
        """Return what `structured_predict` returns without blocking the event loop."""
        held = self._held_to(output_cls.model_json_schema())
        return cast(Model, await LLM.astructured_predict(held, output_cls, prompt, llm_kwargs, **prompt_args))

    def stream_structured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: _Options = None, **prompt_args: Any
    ) -> Generator[Any, None, None]:
        """Yield the object of `structured_predict` as it grows, with None for missing fields; the last is whole."""
        held = self._held_to(output_cls.model_json_schema())
        return LLM.stream_structured_predict(held, output_cls, prompt, llm_kwargs, **prompt_args)

    async def astream_structured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: _Options = None, **prompt_args: Any
    ) -> AsyncGenerator[Any, None]:
        """Return an asynchronous generator of what `stream_structured_predict` yields."""
        held = self._held_to(output_cls.model_json_schema())
        return await LLM.astream_structured_predict(held, output_cls, prompt, llm_kwargs, **prompt_args)

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Return the answer to a filled template, in JSON if its parser reads JSON (selectors, sub-questions).

        Raises MissingExtraError if the parser reads JSON, and the `json` extra is not installed.
        """
        return LLM.predict(self._held_to(schema_of(prompt, prompt_args)), prompt, **prompt_args)

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Return what `predict` returns without blocking the event loop."""
        return await LLM.apredict(self._held_to(schema_of(prompt, prompt_args)), prompt, **prompt_args)

    def _held_to(self, schema: dict[str, Any] | None) -> Self:
        """Return this LLM with every answer held to a JSON schema; None changes nothing."""
        if schema is None:
            return self
        other = self.model_copy()
        other._json = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        return other

    @property
    def _templated(self) -> bool:
        return self.store.bundle.tokenizer.chat_template is not None

    def _from_text(self, prompt: str, formatted: bool) -> Prompt:
        if formatted:
            return prompt
        if self._templated:
            return [{"role": "user", "content": prompt}]
        assert self.completion_to_prompt is not None  # the base class sets a default
        return self.completion_to_prompt(prompt)

    def _from_messages(self, messages: Sequence[ChatMessage]) -> Prompt:
        messages = [_without_thoughts(message) for message in messages]
        if not self._templated:
            assert self.messages_to_prompt is not None  # the base class sets a default
            return self.messages_to_prompt(messages)
        return [{"role": _ROLES.get(m.role, m.role.value), "content": m.content or ""} for m in messages]

    def sampling(self, given: Mapping[str, Any]) -> Sampling:
        return super().sampling({**self._json, **given})

    def _generate(self, prompt: Prompt, given: dict[str, Any]) -> CompletionResponse:
        sampling = self.sampling(given)
        with self.in_scope():
            return _completion(self.decoder.generate([prompt], sampling)[0], sampling)

    def _stream(self, prompt: Prompt, given: dict[str, Any]) -> CompletionResponseGen:
        sampling = self.sampling(given)
        with self.in_scope():  # the prompt is read here, not during iteration
            return _responses(self.decoder.stream(prompt, sampling), sampling)

    async def _agenerate(self, prompt: Prompt, given: dict[str, Any]) -> CompletionResponse:
        async with aclosing(await self._astream(prompt, given, lambda response: response)) as responses:
            *_, last = [response async for response in responses]
        return last.model_copy(update={"delta": None})

    async def _astream(
        self, prompt: Prompt, given: dict[str, Any], shown: Callable[[CompletionResponse], T]
    ) -> AsyncGenerator[T, None]:
        sampling = self.sampling(given)
        with self.in_scope():
            return _aresponses(await self.decoder.astream(prompt, sampling), sampling, shown)


def _without_thoughts(message: ChatMessage) -> ChatMessage:
    """Return a message without another model's thoughts; raise ConfigError if it holds something other than text."""
    blocks = message.blocks
    if _ROLES.get(message.role, message.role.value) == "assistant":
        blocks = [block for block in blocks if not isinstance(block, ThinkingBlock)]
    for block in blocks:
        if not isinstance(block, TextBlock):
            raise ConfigError(f"a message holds a {block.block_type} block: this LLM reads only text")
    return message if blocks == message.blocks else message.model_copy(update={"blocks": blocks})


def _responses(pieces: Iterator[str | Generation], sampling: Sampling) -> CompletionResponseGen:
    text = ""
    for piece in pieces:
        yield (response := _response(text, piece, sampling))
        text = response.text


async def _aresponses(
    pieces: AsyncGenerator[str | Generation, None], sampling: Sampling, shown: Callable[[CompletionResponse], T]
) -> AsyncGenerator[T, None]:
    text = ""
    async with aclosing(pieces):
        async for piece in pieces:
            response = _response(text, piece, sampling)
            text = response.text
            yield shown(response)


def _response(text: str, piece: str | Generation, sampling: Sampling) -> CompletionResponse:
    """Return the response so far, which adds a piece to the `text` of the last response."""
    if isinstance(piece, Generation):
        return _completion(piece, sampling, delta="")
    return CompletionResponse(text=text + piece, delta=piece)


def _completion(answer: Generation, sampling: Sampling, delta: str | None = None) -> CompletionResponse:
    """Return a whole answer; raise ConfigError if its JSON was cut, because the engines that parse it do not say so."""
    if sampling.json_schema is not None and answer.finish_reason == "length":
        raise ConfigError(
            f"max_tokens={sampling.max_tokens} cut the JSON: give a larger one; so far it is {answer.text!r}"
        )
    usage = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    raw = {"usage": usage, "slots": answer.slots, "finish_reason": answer.finish_reason}
    logprobs = None if answer.logprobs is None else [_logprobs(token) for token in answer.logprobs]
    return CompletionResponse(text=answer.text, delta=delta, raw=raw, additional_kwargs=usage, logprobs=logprobs)


def _logprobs(token: TokenLogprob) -> list[LogProb]:
    others = [each for each in token.top if each != (token.token, token.logprob)]
    return [
        LogProb(token=text, logprob=value, bytes=list(text.encode("utf-8", "replace")))
        for text, value in [(token.token, token.logprob), *others]
    ]


def _chat(response: CompletionResponse) -> ChatResponse:
    # The counts go into the response, not the message: LlamaIndex would show a message's to the LLM.
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
        logprobs=response.logprobs,
    )


_RESERVED = 500  # tokens that LlamaIndex keeps free for an answer that it refines


def chat_memory(llm: CompressedContextLLM, token_limit: int | None = None, **options: Any) -> Memory:
    """Return a memory for LlamaIndex's chat engines, which counts a marker as its slots.

    A chat engine fails with "Chunk size ... is not positive" if its history leaves no room for passages, as by
    default it may. Here, a history takes at most half of the tokens that are not reserved for the answer, or
    `token_limit`. `options` go to `Memory.from_defaults`.

    Raises ConfigError if nothing of the window is left.
    """
    window, answer = llm.metadata.context_window, llm.metadata.num_output
    if token_limit is None:
        token_limit = (window - answer - _RESERVED) // 2
    if token_limit <= 0:
        raise ConfigError(
            f"max_tokens={answer} and the {_RESERVED} tokens that LlamaIndex reserves leave nothing of "
            f"the window of {window} for a history: give a smaller max_tokens"
        )
    return Memory.from_defaults(token_limit=token_limit, tokenizer_fn=marker_tokenizer(llm.store, llm.scope), **options)


def marker_tokenizer(store: SoftContextStore, scope: str | None = None) -> Callable[[str], list[int]]:
    """Return the decoder's tokenizer with one id for each slot of a marker, for `Settings.tokenizer`.

    With another tokenizer, LlamaIndex counts a marker's letters when it packs a prompt. Keep a passage's slots below
    the chunk size (also that of a `CitationQueryEngine`): a longer one is cut, and half a marker is only text.

    Args:
        store: the store of the soft contexts.
        scope: tenant or user of the markers; None takes the scope of `ctx_compress_rag.scope`, else the store's.
    """
    preparer = PromptPreparer(store.bundle, store)

    def tokenize(text: str) -> list[int]:
        with nullcontext() if scope is None else in_scope(scope):
            return preparer.token_ids(text)

    return tokenize
