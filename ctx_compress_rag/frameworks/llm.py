"""What the LLM classes of all frameworks share: one decoder, its scope, and copies within the process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import BATCH_SIZE, Sampling, TransformersDecoder
from ctx_compress_rag.decoding.vllm import ServerDecoder
from ctx_compress_rag.errors import ConfigError, short_repr
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import OnUnreadable, check_scope, scope
from ctx_compress_rag.strict import as_positive_int, explain
from ctx_compress_rag.text.templates import messages

OPTIONS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "seed",
    "extractive",
    "logprobs",
    "top_logprobs",
    "decoder_settings",
)
"""Fields of the LLM classes that a call may set anew."""


class DecoderLLM(BaseModel):
    """The base and the options of a framework's LLM class; it comes before the framework's own base class.

    Args:
        store: where the soft contexts are; its bundle, on its device and in its dtype, is the model.
        max_tokens: longest answer, in tokens; by default 512, or that of an imported bundle's training.
        temperature: 0 always takes the most likely token (greedy).
        top_p: sample from the most likely tokens, up to this total probability.
        top_k: sample from this many of the most likely tokens; 0 for all.
        stop: strings that end the answer and are left out of it; a call's own `stop` replaces them.
        seed: makes sampling repeatable; None draws a new one for each call.
        extractive: answers are quotations of the prompt or of the passages that it reads.
        logprobs: give the answer the log-probabilities of its tokens.
        top_logprobs: with `logprobs`, how many of the likeliest tokens at each place to add, 20 at most.
        decoder_settings: apply the decoder's own `generation_config` (`repetition_penalty`, `suppress_tokens`, ...), as
            transformers does; its sampling settings never apply.
        on_unreadable: what to do with a marker whose slots cannot be read (it has another key or scope, was changed, or
            its passage was deleted or damaged): raise an "error", or read the passage's "text" if the store has it,
            else the marker as literal text, with a warning.
        scope: tenant or user whose markers are read; None takes that of `ctx_compress_rag.store.marker.scope`, or the
            store's.
        batch_size: maximum number of prompts in a forward pass.
        server: address of a vLLM server that runs the decoder (see `ctx-compress export`); None runs it here.
        api_key: the server's key.
        timeout: maximum seconds to wait for the server's first token, and from one token to the next.
        max_retries: how often a request is sent again if the server is unreachable, busy or fails.

    Each option from `max_tokens` to `decoder_settings` can also be given per call.

    Raises:
        ConfigError: an argument is unknown or has an impossible value, or a prompt cannot be read.
        UnreadableMarkerError: at a call, a marker is of another key or scope, or was changed.
        MissingPassageError: at a call, a marker's passage is no longer stored.
        PayloadError: at a call, a record is damaged, changed, or signed with another key.
        StoreError: at a call, the store cannot be reached.
        DecoderMemoryError: at a call, the device has not enough memory for the prompt.
        ServerError: at a call, the server cannot be reached or refuses the request.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    # Frozen: what the decoder is made with, which a later assignment would not change.
    store: SoftContextStore = Field(exclude=True, repr=False, frozen=True)
    max_tokens: int = Sampling.max_new_tokens
    temperature: float = Sampling.temperature
    top_p: float = Sampling.top_p
    top_k: int = Sampling.top_k
    stop: list[str] | None = None
    seed: int | None = None
    extractive: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    decoder_settings: bool = True
    on_unreadable: OnUnreadable = Field(default="error", frozen=True)
    scope: str | None = None
    batch_size: int = Field(default=BATCH_SIZE, ge=1, frozen=True)
    server: str | None = Field(default=None, frozen=True)
    api_key: SecretStr | None = Field(default=None, exclude=True, frozen=True)
    timeout: float = Field(default=120.0, frozen=True)
    max_retries: int = Field(default=2, frozen=True)

    _decoder: TransformersDecoder | None = PrivateAttr(None)

    def __init__(self, **fields: Any) -> None:
        given = {name: value for name, value in fields.items() if value is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None
        if self.scope is not None:
            check_scope(self.scope)
        bundle = self.store.bundle
        if "max_tokens" not in self.model_fields_set and isinstance(bundle, Bundle) and bundle.config.source:
            self.max_tokens = bundle.config.answer_tokens
        self.sampling({})  # impossible values are refused here, not at the first question

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled: the model and the store belong to this process."""
        raise ConfigError(f"{type(self).__name__} holds a model of this process: create it in the other process")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy with options of its own; the model and the store are shared."""
        return self.model_copy()

    def _question_messages(self, context: str, question: str) -> list[dict[str, str]]:
        """How the store's bundle was trained to be asked: messages with these two variables of a format string."""
        holes = ("\ue000context\ue000", "\ue000question\ue000")
        bundle = self.decoder.bundle
        assert isinstance(bundle, Bundle)
        asked = messages(bundle.config.template, *holes)
        for message in asked:
            text = message["content"].replace("{", "{{").replace("}", "}}")
            message["content"] = text.replace(holes[0], f"{{{context}}}").replace(holes[1], f"{{{question}}}")
        return asked

    def sampling(self, given: Mapping[str, Any]) -> Sampling:
        """How a call's answer is sampled: by its options, else by the LLM's own.

        Args:
            given: options of the call; None means the LLM's own. Besides `OPTIONS`, OpenAI's `response_format`:
                {"type": "json_schema", "json_schema": {"schema": ...}}.

        Raises:
            ConfigError: an option is unknown, or a value impossible.
        """
        given = dict(given)
        schema = _schema_of(given.pop("response_format", None))
        if unknown := sorted(given.keys() - set(OPTIONS)):
            raise ConfigError(
                f"{type(self).__name__} has no option {unknown[0]!r} for a call: there are {', '.join(OPTIONS)}"
            )
        chosen = {name: getattr(self, name) if given.get(name) is None else given[name] for name in OPTIONS}
        max_tokens, stop = as_positive_int("max_tokens", chosen.pop("max_tokens")), chosen.pop("stop")
        stop = (stop,) if isinstance(stop, str) else stop or ()
        return Sampling(max_new_tokens=max_tokens, stop=stop, json_schema=schema, **chosen)

    @property
    def decoder(self) -> TransformersDecoder:
        """The decoder that answers."""
        if self._decoder is None:
            bundle = self.store.bundle
            if not isinstance(bundle, Bundle):
                raise ConfigError(f"bundle {bundle.config.name!r} has no decoder: open the store with a Bundle")
            if self.server is None:
                self._decoder = TransformersDecoder(
                    bundle,
                    self.store,
                    on_unreadable=self.on_unreadable,
                    batch_size=self.batch_size,
                )
            else:
                self._decoder = ServerDecoder(
                    bundle,
                    self.store,
                    server=self.server,
                    api_key=None if self.api_key is None else self.api_key.get_secret_value(),
                    timeout=self.timeout,
                    max_retries=self.max_retries,
                    on_unreadable=self.on_unreadable,
                )
        return self._decoder

    def with_decoder(self, decoder: TransformersDecoder) -> Self:
        """A copy that answers with another decoder of the same store."""
        other = self.model_copy()
        other._decoder = decoder
        return other

    def in_scope(self) -> AbstractContextManager[None]:
        """A block in which prompts are read with the LLM's `scope`."""
        return nullcontext() if self.scope is None else scope(self.scope)


def _schema_of(response_format: object) -> Any:
    match response_format:
        case None:
            return None
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise ConfigError(
        f"response_format={short_repr(response_format)}: give "
        '{"type": "json_schema", "json_schema": {"schema": ...}}, or use with_structured_output'
    )
