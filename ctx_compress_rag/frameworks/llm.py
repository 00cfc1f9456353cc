"""What the LLM classes of all frameworks share: one decoder, its scope, and copies within the process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NoReturn, Self

from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, ValidationError

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder, EngineOptions
from ctx_compress_rag.decoding.sampling import OPTIONS, Sampling, SamplingOptions
from ctx_compress_rag.errors import ConfigError, short_repr
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import OnUnreadable, check_scope, current_scope, scope
from ctx_compress_rag.strict import check_known, explain
from ctx_compress_rag.text.templates import messages

logger = logging.getLogger(__name__)

_JSON_TOKENS = 128  # unless the user gives a limit: a decoder that cannot fill fields may not end them either
_ENGINE_OPTIONS = tuple(EngineOptions.__annotations__)


class DecoderLLM(SamplingOptions):
    """The base and the options of a framework's LLM class; it comes before the framework's own base class.

    Besides these, the options of an answer, which can also be given per call: see `SamplingOptions`. `max_tokens` is by
    default 512, or that of an imported bundle's training. `extractive` is by default what the bundle answers best with
    (`BundleConfig.extractive`), except for JSON and on a server: set it to False for summaries and rewritten questions.

    Args:
        store: where the soft contexts are; its bundle, on its device and in its dtype, is the model.
        on_unreadable: what to do with a marker whose slots cannot be read (it has another key or scope, was changed, or
            its passage was deleted or damaged): raise an "error", or read the passage's "text" if the store has it,
            else the marker as literal text, with a warning.
        scope: tenant or user whose markers are read; None takes that of `ctx_compress_rag.store.marker.scope`, or the
            store's.
        engine: what runs the decoder: "transformers" or "llama.cpp", in this process, or the address of a vLLM server
            (see `ctx-compress export`).
        batch_size: with transformers, maximum number of prompts in a forward pass; with llama.cpp, of answers at a
            time.
        merge: with transformers, keep a second copy of the weights that the reader's LoRA changes, with the LoRA merged
            into them: faster, and the last bits of scores may differ.
        weights: with llama.cpp, "BF16", "F32", "Q8_0" or "Q4_0", or a folder that `ctx-compress export` wrote.
        context_size: with llama.cpp, maximum positions of all prompts and answers together.
        api_key: a server's key.
        timeout: maximum seconds to wait for a server's first token, and from one token to the next.
        max_retries: how often a request is sent again if a server is unreachable, busy or fails.

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
    on_unreadable: OnUnreadable = Field(default="error", frozen=True)
    scope: str | None = None
    engine: str = Field(default="transformers", frozen=True)
    batch_size: int = Field(default=8, ge=1, frozen=True)
    merge: bool = Field(default=False, frozen=True)
    weights: str = Field(default="BF16", frozen=True)
    context_size: int = Field(default=4096, ge=1, frozen=True)
    api_key: SecretStr | None = Field(default=None, exclude=True, frozen=True)
    timeout: float = Field(default=120.0, frozen=True)
    max_retries: int = Field(default=2, frozen=True)

    _decoder: Decoder | None = PrivateAttr(None)
    _quotes_by_default: bool = PrivateAttr(False)

    def __init__(self, **fields: Any) -> None:
        given = {name: value for name, value in fields.items() if value is not None}
        check_known(type(self).__name__, given, type(self).model_fields)
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None
        if self.scope is not None:
            check_scope(self.scope)
        bundle = self.store.bundle
        if "max_tokens" not in self.model_fields_set and isinstance(bundle, Bundle) and bundle.config.source:
            self.max_tokens = bundle.config.answer_tokens
        if isinstance(bundle, Bundle) and bundle.config.extractive and "extractive" not in self.model_fields_set:
            self.extractive = self._quotes_by_default = not self.engine.startswith("http")  # a server cannot quote
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
        check_known(f"a call of {type(self).__name__}", given, OPTIONS)
        chosen = {name: getattr(self, name) if given.get(name) is None else given[name] for name in OPTIONS}
        if schema is not None and self._quotes_by_default and given.get("extractive") is None:
            chosen["extractive"] = False
            _warn_once(
                f"bundle {self.store.bundle.config.name!r} answers best with quotations: the fields of its JSON are "
                "often empty or wrong. Fill them with another model, from this one's answer"
            )
            if "max_tokens" not in self.model_fields_set and given.get("max_tokens") is None:
                chosen["max_tokens"] = _JSON_TOKENS
        return Sampling(json_schema=schema, **chosen)

    @property
    def decoder(self) -> Decoder:
        """The decoder that answers."""
        if self._decoder is None:
            bundle = self.store.bundle
            if not isinstance(bundle, Bundle):
                raise ConfigError(f"bundle {bundle.config.name!r} has no decoder: open the store with a Bundle")
            # A framework that restores an LLM gives all fields: only what differs from the default is asked for.
            fields = type(self).model_fields
            options: Any = {n: v for n in _ENGINE_OPTIONS if (v := getattr(self, n)) != fields[n].default}
            if self.api_key is not None:
                options["api_key"] = self.api_key.get_secret_value()
            self._decoder = Decoder(bundle, self.store, engine=self.engine, on_unreadable=self.on_unreadable, **options)
        return self._decoder

    def with_decoder(self, decoder: Decoder) -> Self:
        """A copy that answers with another decoder of the same store."""
        other = self.model_copy()
        other._decoder = decoder
        return other

    @property
    def _identity(self) -> dict[str, Any]:
        """What an answer depends on besides the prompt: the key that caches keep it under, without secrets."""
        return {
            "fingerprint": self.store.fingerprint,
            "scope": self.scope or current_scope() or self.store.scope,
            "on_unreadable": self.on_unreadable,
            **self.decoder.engine.identity,
            **{name: getattr(self, name) for name in OPTIONS},
        }

    def in_scope(self) -> AbstractContextManager[None]:
        """A block in which prompts are read with the LLM's `scope`."""
        return nullcontext() if self.scope is None else scope(self.scope)


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


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
