"""Define the chat model, whose decoder reads markers as the soft contexts that they stand for, and its messages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableSerializable
from langchain_core.runnables.utils import AnyConfigurableField
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import openai_chat_logprobs
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.frameworks import DecoderLLM
from ctx_compress_rag.text.chat import THOUGHTS

_PROVIDER = "ctx-compress"


class ChatCompressedContext(DecoderLLM, BaseChatModel):
    """A bundle's decoder as a LangChain chat model.

    Markers in the messages are read as the soft contexts that they stand for. A prompt without markers is answered by
    the full-text decoder (the teacher). Concurrent calls share forward passes. Async calls run in a thread; a canceled
    call stops after the token in progress. The model calls no tools and reads no images.

    `usage_metadata` counts a slot as one token. `response_metadata` has the number of `slots`, and in `logprobs` the
    log-probabilities in OpenAI's format.

    The options and errors are those of `ctx_compress_rag.frameworks.DecoderLLM`. Options of an answer can also be
    given at each call, as in `model.bind(temperature=0.7)` or `model.invoke(x, top_k=5)`.

    Args:
        streaming: make `invoke` stream internally, so that callbacks see every piece.
    """

    streaming: bool = False

    def with_decoder(self, decoder: Decoder) -> Self:
        """Return a copy with another decoder of the store, not cached, because LangChain's caches see only options."""
        other = super().with_decoder(decoder)
        other.cache = False
        return other

    def question_prompt(self) -> ChatPromptTemplate:
        """Return the prompt that the store's bundle was trained with, for a chain's `context` and `input`."""
        asked = self._question_messages("context", "input")
        return ChatPromptTemplate([(message["role"], message["content"]) for message in asked])

    @property
    def model_name(self) -> str:
        """Return the bundle's name."""
        return str(self.store.bundle.config.name)

    @property
    def _llm_type(self) -> str:
        return _PROVIDER

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Return what an answer depends on, as a key for caches; never the store's secret."""
        return {
            "model_name": self.model_name,
            # Under one name: LangChain puts a call's `stop` over a field of that name, even if it is None.
            "ctx_compress": self._identity,
            "output_version": self.output_version or "v0",
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = _PROVIDER
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # A stream can be stopped, a call in a thread cannot: stream, so that a canceled task frees the decoder.
        async with aclosing(self._astream(messages, stop, **kwargs)) as chunks:  # type: ignore[type-var]
            return await agenerate_from_stream(chunks)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        sampling = self.sampling(kwargs if stop is None else {**kwargs, "stop": stop})
        with self.in_scope():  # the prompt is read here, not during iteration
            pieces = self.decoder.stream(to_chat(messages), sampling)
        for piece in pieces:
            if isinstance(piece, str):
                yield ChatGenerationChunk(message=AIMessageChunk(content=piece))
                continue
            usage = UsageMetadata(
                input_tokens=piece.prompt_tokens,
                output_tokens=piece.completion_tokens,
                total_tokens=piece.prompt_tokens + piece.completion_tokens,
            )
            metadata: dict[str, Any] = {
                "model_name": self.model_name,
                # LangChain's middleware believes the usage only of the model named here and in `_get_ls_params`.
                "model_provider": _PROVIDER,
                "finish_reason": piece.finish_reason,
                "slots": piece.slots,
            }
            if piece.logprobs is not None:
                metadata["logprobs"] = openai_chat_logprobs(piece.logprobs)
            last = AIMessageChunk(content="", usage_metadata=usage, response_metadata=metadata, chunk_position="last")
            yield ChatGenerationChunk(message=last, generation_info={"finish_reason": piece.finish_reason})

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, with one placeholder id for each slot of a marker."""
        with self.in_scope():
            return self.decoder.preparer.token_ids(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return the positions of messages in the decoder, with template and slots. `tools` are not counted."""
        if not messages:  # asked by LangChain as it trims
            return 0
        with self.in_scope():
            return self.decoder.preparer.count_chat_tokens(to_chat(messages))

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return a chain whose answers fit `schema`; tokens that would break the JSON are never chosen.

        The schema is not added to the prompt, which has to ask for the schema's fields.

        Args:
            schema: a pydantic class, whose objects are returned, or a TypedDict or JSON schema, for plain JSON values.
            include_raw: return a dict of the message (`raw`), the object (`parsed`) and the error (`parsing_error`).
            kwargs: other models' `method` and `strict` are accepted and ignored.

        Raises:
            ConfigError: an argument is unknown; at a call, the schema cannot be enforced.
            MissingExtraError: at a call, the `json` extra is not installed.
            OutputParserException: at a call, the answer was cut at `max_tokens`.
        """
        if unknown := sorted(kwargs.keys() - {"method", "strict"}):
            raise ConfigError(f"with_structured_output has no option {unknown[0]!r}: it takes include_raw")
        # LangChain's conversion keeps only the title of a schema without `properties`: only tools go through it.
        is_tool = isinstance(schema, dict) and schema.keys() & {"name", "function", "toolSpec"}
        form = convert_to_json_schema(schema) if is_tool or not isinstance(schema, dict) else schema
        wanted = {"type": "json_schema", "json_schema": {"schema": form}}
        parse: Any = partial(parsed_with_raw if include_raw else parsed, schema)
        return self.bind(response_format=wanted) | RunnableLambda(parse)

    def configurable_fields(
        self, **fields: AnyConfigurableField
    ) -> RunnableSerializable[LanguageModelInput, AIMessage]:
        """Return a model whose options a call's config may set.

        Raises ConfigError if this model has its own decoder: LangChain would make a new model from the options alone.
        """
        if self.decoder.bundle is not self.store.bundle:
            raise ConfigError(
                "configurable_fields would lose this model's decoder, since LangChain makes a new model from the "
                f"options: give {', '.join(fields)} to bind() or to the call"
            )
        return super().configurable_fields(**fields)

    def _resolve_model_profile(self) -> ModelProfile:
        bundle, profile = self.store.bundle, ModelProfile(structured_output=True, tool_calling=False)
        if (window := bundle.window) is not None:
            profile |= {"max_input_tokens": window, "max_output_tokens": window}
        return profile

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with other options bound; `tools` has to be empty, because this model calls none.

        Raises ConfigError if there are tools.
        """
        if not tools:
            return self.bind(**{name: value for name, value in kwargs.items() if name != "strict"})
        raise ConfigError(
            f"{type(self).__name__} calls no tools: leave them out (create_agent takes tools=[]), or give the agent "
            "another model and this one's chain as a tool"
        )


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
