"""Define the bases of all frameworks' LLM classes and postprocessors: their options, checks and errors."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from typing import Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from ctx_compress_rag.decoding.decoder import Decoder, quotes_by_default
from ctx_compress_rag.decoding.engines.protocol import EngineOptions
from ctx_compress_rag.decoding.filters import requested_json_schema
from ctx_compress_rag.decoding.sampling import OPTIONS, Sampling, SamplingOptions, sampling_with_defaults
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.mark import Marking, OnMissing
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import OnUnreadable, check_scope, current_scope, scope
from ctx_compress_rag.strict import check_known_options, faults_raised_as
from ctx_compress_rag.text.templates import question_messages


class StoreComponent(BaseModel):
    """The base of classes that work on a store; unknown arguments and impossible values are refused (ConfigError)."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    store: SoftContextStore = Field(exclude=True, repr=False)

    def __init__(self, **fields: Any) -> None:
        check_known_options(type(self).__name__, fields, type(self).model_fields)
        with faults_raised_as(ConfigError, f"{type(self).__name__}: "):
            super().__init__(**fields)


class DecoderLLM(StoreComponent, SamplingOptions, EngineOptions):
    """The base and options of a framework's LLM class, listed before the framework's own base class.

    Other options are those of the engine (see `EngineOptions`) and of an answer (see `SamplingOptions`). `max_tokens`
    is by default 512, or as in the training of an imported bundle. `extractive` is by default that of the bundle
    (`BundleConfig.extractive`), except for JSON and on a server; set it to False for summaries and rewritten questions.

    Args:
        store: the store of the soft contexts; its bundle, on its device and in its dtype, is the model.
        on_unreadable: what to do with a marker that was changed, that has another key or scope, or whose passage is
            missing or damaged in the store. "error" raises. "text" logs a warning and reads the passage's text if the
            store can give it, else the marker as ordinary text.
        scope: tenant or user whose markers are read; None takes that of `ctx_compress_rag.scope`, else the store's.
        engine: "transformers", "llama.cpp", or the address of a vLLM server (see `ctx-compress export`).

    Raises:
        ConfigError: an argument is unknown or has an impossible value, or a prompt cannot be read.
        UnreadableMarkerError: at a call, a marker has another key or scope, or was changed.
        MissingPassageError: at a call, a marker's passage is no longer stored.
        PayloadError: at a call, a record is damaged, changed, or signed with another key.
        StoreError: at a call, the store cannot be reached.
        DecoderMemoryError: at a call, the device does not have enough memory for the prompt.
        ServerError: at a call, the server cannot be reached or refuses the request.
    """

    # Frozen, because the decoder is made once: a later assignment would have no effect.
    store: SoftContextStore = Field(exclude=True, repr=False, frozen=True)
    on_unreadable: OnUnreadable = Field(default="error", frozen=True)
    scope: str | None = None
    engine: str = Field(default="transformers", frozen=True)

    _decoder: Decoder | None = PrivateAttr(None)
    _quotes_by_default: bool = PrivateAttr(False)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{name: value for name, value in fields.items() if value is not None})
        if self.scope is not None:
            check_scope(self.scope)
        bundle = self.store.bundle
        if "max_tokens" not in self.model_fields_set and bundle.config.source:
            self.max_tokens = bundle.config.answer_tokens
        if "extractive" not in self.model_fields_set and quotes_by_default(bundle, self.engine):
            self.extractive = self._quotes_by_default = True
        self.sampling({})  # impossible values are refused here, not at the first question

    def __getstate__(self) -> NoReturn:
        """Raise ConfigError, because the model and the store cannot leave this process by pickling."""
        raise ConfigError(f"{type(self).__name__} holds a model of this process: create it in the other process")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return a copy with its own options; the model and the store are shared."""
        return self.model_copy()

    def _question_messages(self, context: str, question: str) -> list[dict[str, str]]:
        """Return the prompt of the bundle's training as messages, with these two variables of a format string."""
        escaped = self.store.bundle.config.template.replace("{", "{{").replace("}", "}}")
        return question_messages(escaped, context, question)  # of {{context}}, only the inner braces are replaced

    def sampling(self, given: Mapping[str, Any]) -> Sampling:
        """Return how a call's answer is sampled, by options of the call, or of this LLM where those are absent or None.

        A call may also have OpenAI's `response_format`. An unknown option or an impossible value raises ConfigError.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        schema = requested_json_schema(chosen.pop("response_format", None))
        check_known_options(f"a call of {type(self).__name__}", given, (*OPTIONS, "response_format"))
        own = self.model_fields_set - ({"extractive"} if self._quotes_by_default else set())
        chosen = {name: getattr(self, name) for name in OPTIONS if name in own} | chosen | {"json_schema": schema}
        config = self.store.bundle.config
        return Sampling(
            **sampling_with_defaults(chosen, config, max_tokens=self.max_tokens, extractive=self.extractive)
        )

    @property
    def decoder(self) -> Decoder:
        """Return the decoder that answers, which is made at first use."""
        if self._decoder is None:
            # A framework that restores an LLM gives all fields: only what differs from the default is asked for.
            fields = EngineOptions.model_fields.items()
            options = {name: value for name, field in fields if (value := getattr(self, name)) != field.default}
            bundle = self.store.bundle
            self._decoder = Decoder(bundle, self.store, engine=self.engine, on_unreadable=self.on_unreadable, **options)
        return self._decoder

    def with_decoder(self, decoder: Decoder) -> Self:
        """Return a copy that answers with another decoder of the same store."""
        other = self.model_copy()
        other._decoder = decoder
        return other

    @property
    def _identity(self) -> dict[str, Any]:
        """Return what an answer depends on besides the prompt, as a key for caches, without secrets."""
        return {
            "fingerprint": self.store.bundle.fingerprint,  # of what affects slots; the whole config may affect answers
            "config": sha256(self.store.bundle.config.model_dump_json().encode()).hexdigest(),
            "scope": self.scope or current_scope() or self.store.scope,
            "on_unreadable": self.on_unreadable,
            **self.decoder.engine.identity,
            **{name: getattr(self, name) for name in OPTIONS},
        }

    def in_scope(self) -> AbstractContextManager[None]:
        """Return a context in which prompts are read with the LLM's `scope`."""
        return nullcontext() if self.scope is None else scope(self.scope)


class MarkingPostprocessor(StoreComponent):
    """The base and options of a framework's postprocessor class, listed before the framework's own base class.

    A passage is looked up in the store by its id, then by its text. With a RAM bundle, the segments that the question
    needs stay text, and markers stand for the rest of a passage; the LLM must then have the same store object.

    Args:
        store: the store of the soft contexts.
        ratio: source tokens per slot, a multiple of the store's ratio; None takes the store's. With a RAM bundle, 2 or
            more: one part in `ratio` of the text stays; None takes the bundle's smallest ratio.
        token_budget: in place of a ratio, the most tokens for all passages of a question together, with slots, text and
            the blank lines between passages, as the LLM counts them. Metadata and template are not counted. A ratio
            stands for the budget that all passages would take at this ratio.
        text_share: the share of this budget, 0 to 1, for the sentences nearest to the question (MiniLM), as text. The
            rest is for slots of the most relevant passage, which is the first if there are no scores; passages with no
            share are dropped. 0 shows every passage as slots. None shows the share with which the bundle answers best
            (`BundleConfig.text_share`), given several passages, a question and the extra `sentences`; else slots.
        on_missing: what to do with each passage that the store lacks, has with another text, or has damaged. "compress"
            compresses and stores the passage, or keeps its text with a warning if that is impossible. "error" raises.
            "text" keeps the text. See `ctx_compress_rag.marking.mark.OnMissing`.
        scope: tenant or user of the markers; None takes the scope of `ctx_compress_rag.scope`, else the store's.

    Raises:
        ConfigError: an argument is unknown or has an impossible value, or both a ratio and a budget are given; at a
            call, a RAM bundle or a `text_share` gets no question, or a score is not a number.
        RatioError: the ratio cannot be made from what is stored; at a call, the budget is too small.
        ConfigError, MissingPassageError, PayloadError: at a call, `on_missing` is "error", and a passage is
            missing, damaged, or cannot be stored.
        StoreError: at a call, the store cannot be reached.
    """

    ratio: int | None = None
    token_budget: int | None = None
    text_share: float | None = None
    on_missing: OnMissing = "compress"
    scope: str | None = None

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        _ = self.marking  # refuses impossible values

    def __getstate__(self) -> NoReturn:
        """Raise ConfigError, because the store cannot leave this process by pickling."""
        raise ConfigError(f"{type(self).__name__} holds a store of this process: create it in the other process")

    @property
    def marking(self) -> Marking:
        """Return the Marking, with these options, that turns retrieved texts into markers and sentences."""
        return Marking(self.store, self.ratio, self.token_budget, self.text_share, self.on_missing, self.scope)
