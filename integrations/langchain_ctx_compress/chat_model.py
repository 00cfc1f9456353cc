"""The chat model: a decoder in this process that reads markers as the soft contexts they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from pathlib import Path
from typing import Any, Literal, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.language_models.chat_models import agenerate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from ctx_compress_rag.adaptation import Adaptation, AdaptiveDecoder, Demonstration, serving
from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.config import explain
from ctx_compress_rag.decoders.transformers import Generation, Sampling
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.markers import check_scope, current_scope, scope
from ctx_compress_rag.stores import SoftContextStore
from langchain_ctx_compress.messages import to_chat

# LangChain's own code gives these to any chat model; for one in this process they mean nothing.
_OF_REMOTE_MODELS = {"timeout", "max_retries", "api_key"}


class ChatCompressedContext(BaseChatModel):
    """A bundle's decoder as a LangChain chat model.

    Markers in the messages are read as the soft contexts they stand for; a prompt without any is read by
    the decoder as it is (the full-text teacher). The decoder runs in this process, one call at a time;
    async calls run in a thread, and a cancelled one stops it after the token in progress. It calls no tools and
    reads no images.

    `usage_metadata` counts a slot as one token; `response_metadata` has the number of `slots`.

    Args:
        store: where the soft contexts are; its bundle is the model.
        max_tokens: longest answer, in tokens.
        temperature: 0 is greedy.
        top_p: sample from the likeliest tokens of this total probability.
        top_k: sample from this many tokens; 0 for all.
        stop: strings that end the answer and are left out of it; `stop` of a call takes their place.
        seed: of sampling; None for a new one each time.
        on_missing: what to do where a passage's slots cannot be read: raise an "error", or read its "text".
            A passage that is no longer stored has neither, and is an error.
        scope: tenant or user whose markers are read; None takes the one of `markers.scope`, or else the store's.
        streaming: make `invoke` stream inside, so that callbacks see every piece.
        predictor: folder of the update predictor that `adapt` uses.

    Each sampling argument can also be given per call: `model.bind(temperature=0.7)`, `model.invoke(x, top_k=5)`.

    Raises:
        ConfigError: an argument is unknown or has an impossible value.
        MissingPassageError: at a call, a marker's passage is no longer stored.
        StoreError: at a call, the store cannot be reached.
        DecoderMemoryError: at a call, the device has not enough memory for the prompt.
    """

    model_config = ConfigDict(extra="forbid")

    store: SoftContextStore = Field(exclude=True, repr=False)
    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: list[str] | None = None
    seed: int | None = None
    on_missing: Literal["error", "text"] = "error"
    scope: str | None = None
    streaming: bool = False
    predictor: str | Path | None = None

    _decoder: AdaptiveDecoder | None = PrivateAttr(None)
    _adapted: str | None = PrivateAttr(None)

    def __init__(self, **kwargs: Any) -> None:
        try:
            super().__init__(**kwargs)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None
        if self.scope is not None:
            check_scope(self.scope)
        self._sampling(None, {})  # impossible values are refused here, not at the first question

    @model_validator(mode="before")
    @classmethod
    def _drop_remote(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if k not in _OF_REMOTE_MODELS} if isinstance(values, dict) else values

    @property
    def model_name(self) -> str:
        """The bundle's name."""
        return self.store.bundle.config.name

    @property
    def _llm_type(self) -> str:
        return "ctx-compress"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """What an answer depends on, and hence the key it is cached under; never the store's secret."""
        return {
            "model_name": self.model_name,
            "fingerprint": self.store.fingerprint,
            "scope": self.scope or current_scope() or self.store.scope,
            "on_missing": self.on_missing,
            "adapted": self._adapted,
            **{name: getattr(self, name) for name in _SAMPLING},
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "ctx-compress"
        return params

    @property
    def decoder(self) -> AdaptiveDecoder:
        """The decoder that answers."""
        if self._decoder is None:
            if not isinstance(self.store.bundle, Bundle):
                raise ConfigError(f"bundle {self.model_name!r} has no decoder: open the store with a Bundle")
            self._decoder = AdaptiveDecoder(self.store.bundle, self.store, on_missing=self.on_missing)
        return self._decoder

    def adapt(
        self,
        demonstrations: Sequence[Demonstration],
        adaptation: Adaptation | str | Path | None = None,
        ratio: int | None = None,
    ) -> ChatCompressedContext:
        """A chat model that answers as the demonstrations do (RAG-GD, paper 003); this one stays as it is.

        All models adapted from one share its weights in memory, and may be used side by side in threads.
        `ctx_compress_rag.adaptation.generate_together` answers with several of their `decoder`s in one batch.

        Args:
            demonstrations: solved examples: question, passages, answer.
            adaptation: a way to adapt, or the folder of an update predictor or a peft adapter; by default the
                model's own `predictor`.
            ratio: read the demonstrations' passages as soft contexts of the store, so many source tokens to a
                slot (missing ones are compressed); None reads them as they are, texts or markers.

        Raises:
            ConfigError: there are no demonstrations, or no adaptation.
            BundleError: the folder holds nothing for this model.
        """
        chosen = adaptation or self.predictor
        if chosen is None:
            raise ConfigError(f"{type(self).__name__} has no predictor: give predictor=, or an adaptation to adapt")
        with self._in_scope():
            return self._with_decoder(serving.adapt(self.decoder, demonstrations, chosen, ratio))

    def with_adapter(self, folder: str | Path) -> ChatCompressedContext:
        """A chat model with a saved peft adapter of this decoder's Q/K/V projections; this one stays as it is.

        Raises:
            BundleError: the folder holds no adapter for this model.
        """
        return self._with_decoder(serving.with_adapter(self.decoder, folder))

    def save_adapter(self, folder: str | Path) -> None:
        """Write what `adapt` changed as an ordinary peft adapter, which `with_adapter` and other engines load.

        Raises:
            ConfigError: nothing was changed that an adapter can hold.
        """
        serving.save_adapter(self.decoder, folder)

    def _with_decoder(self, decoder: AdaptiveDecoder) -> ChatCompressedContext:
        other = self.model_copy()
        other._decoder, other._adapted = decoder, serving.digest(decoder.adapted)
        return other

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        sampling = self._sampling(stop, kwargs)
        with self._in_scope():
            (done,) = self.decoder.generate([to_chat(messages)], sampling)
        message = AIMessage(
            content=done.text, usage_metadata=_usage(done), response_metadata=self._response_metadata(done)
        )
        generation = ChatGeneration(message=message, generation_info={"finish_reason": done.finish_reason})
        return ChatResult(generations=[generation], llm_output={"model_name": self.model_name})

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # A stream can be stopped, a call in a thread cannot: a cancelled task gives the decoder back.
        async with aclosing(self._astream(messages, stop, **kwargs)) as chunks:  # type: ignore[type-var]
            done = await agenerate_from_stream(chunks)
        return ChatResult(generations=done.generations, llm_output={"model_name": self.model_name})

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self._in_scope():  # the prompt is read before this returns, none of it during iteration
            pieces = self.decoder.stream(to_chat(messages), self._sampling(stop, kwargs))
        for piece in pieces:
            if isinstance(piece, str):
                yield ChatGenerationChunk(message=AIMessageChunk(content=piece))
                continue
            last = AIMessageChunk(
                content="",
                usage_metadata=_usage(piece),
                response_metadata=self._response_metadata(piece),
                chunk_position="last",
            )
            yield ChatGenerationChunk(message=last, generation_info={"finish_reason": piece.finish_reason})

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, one placeholder id per slot for each marker in it."""
        with self._in_scope():
            return self.decoder.token_ids(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Positions that the messages take in the decoder, chat template included and slots counted.

        `tools` are not counted: this model calls none.
        """
        with self._in_scope():
            return serving.prompt_tokens(self.decoder, to_chat(messages))

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> NoReturn:
        """This model calls no tools.

        Raises:
            NotImplementedError: always; LangChain's own says nothing more.
        """
        raise NotImplementedError(
            f"{type(self).__name__} calls no tools: leave them out (create_agent takes tools=[]), or give the agent "
            "another model and this one's chain as a tool"
        )

    def _in_scope(self) -> AbstractContextManager[None]:
        return nullcontext() if self.scope is None else scope(self.scope)

    def _sampling(self, stop: list[str] | None, overrides: Mapping[str, Any]) -> Sampling:
        unknown = sorted(overrides.keys() - set(_SAMPLING))
        if unknown:
            raise ConfigError(f"{type(self).__name__} has no option {unknown[0]!r} for a call: there are {_SAMPLING}")
        chosen = {name: getattr(self, name) for name in _SAMPLING} | dict(overrides)
        own_stop, max_tokens = chosen.pop("stop"), chosen.pop("max_tokens")
        strings = own_stop if stop is None else stop
        return Sampling(max_new_tokens=max_tokens, stop=tuple(strings or ()), **chosen)

    def _response_metadata(self, done: Generation) -> dict[str, Any]:
        return {"model_name": self.model_name, "finish_reason": done.finish_reason, "slots": done.slots}


_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")


def _usage(done: Generation) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=done.prompt_tokens,
        output_tokens=done.completion_tokens,
        total_tokens=done.prompt_tokens + done.completion_tokens,
    )
