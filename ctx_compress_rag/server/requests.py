"""Check requests for chat completions and completions, as in OpenAI's API, and for markers of texts (compress).

Null means absent in every field. A field that only describes the client, or asks for nothing, is ignored. Any other
field that is not served is refused by name.
"""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.decoding.filters import requested_json_schema
from ctx_compress_rag.decoding.sampling import OPTIONS, Sampling, SamplingOptions, sampling_with_defaults
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.prompt import Message
from ctx_compress_rag.server.guard import RequestError, ServerLimits
from ctx_compress_rag.strict import explain_fault
from ctx_compress_rag.text.chat import THOUGHTS

_SCHEMA_CHARACTERS = 1 << 16  # reading one of this length takes half a second, in which everyone waits

# Passed over: they describe the client, or what it would do with tools.
_OF_THE_CLIENT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
}
# What a field may hold that asks for nothing, besides 0, false and what is empty.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
}


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is not a character: decode the text again") from None
    return text


def _short_schema(schema: dict[str, Any]) -> str:
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise ConfigError("the schema is nested too deeply: make it flatter") from None
    if len(text) > _SCHEMA_CHARACTERS:
        raise ConfigError(f"the schema has {len(text)} characters, over {_SCHEMA_CHARACTERS}: make it smaller")
    return text


Text = Annotated[str, AfterValidator(_unicode)]
OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Parts = BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value)


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        return {name: value for name, value in given.items() if name in cls.model_fields or _asks(name, value)}


def _asks(name: str, value: Any) -> bool:
    return name not in _OF_THE_CLIENT and value not in (0, "", [], {}) and value not in _NEUTRAL.get(name, ())


class TextPart(_Request):
    type: Literal["text"]
    text: Text


class ChatMessage(_Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], Parts] | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_thoughts(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("role") != "assistant":
            return data
        kept = {name: value for name, value in data.items() if name not in THOUGHTS}
        if isinstance(parts := kept.get("content"), list):
            kept["content"] = [part for part in parts if not (isinstance(part, dict) and part.get("type") in THOUGHTS)]
        return kept

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":  # whose turn may have held a call only
            raise ValueError("it has no content: send it")
        return self

    def as_message(self) -> Message:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content or ())}


class StreamOptions(_Request):
    include_usage: bool = False


class GenerationRequest(_Request, SamplingOptions):
    """The fields that chat completions and completions share, which include the options of an answer."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def sampling(self, limits: ServerLimits, config: BundleConfig, extractive: bool = False) -> Sampling:
        """Return the options of the answer; `extractive` holds for requests that leave it out and ask for no JSON."""
        given = {name: getattr(self, name) for name in OPTIONS if name in self.model_fields_set}
        given |= self._own_options()
        options = sampling_with_defaults(given, config, max_tokens=limits.answer_tokens, extractive=extractive)
        options["max_tokens"] = min(options["max_tokens"], limits.longest_answer or sys.maxsize)
        return Sampling(**options)

    def _own_options(self) -> dict[str, Any]:
        """Return the options of an answer that this kind of request gives in another form."""
        return {}


class ChatCompletionRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: dict[str, Any] | None = None

    def _own_options(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            own["max_tokens"] = self.max_completion_tokens
        if (schema := requested_json_schema(self.response_format)) is not None:
            own["json_schema"] = _short_schema(schema)
        return own

    def prompt(self) -> list[Message]:
        return [message.as_message() for message in self.messages]


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`, with raw prompts, one choice for each, and no chat template."""

    prompt: Annotated[list[Text], Field(min_length=1, max_length=128), OneOrMore]
    # Here a number, with 0 for the tokens that were taken alone.
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None  # type: ignore[assignment]

    def _own_options(self) -> dict[str, Any]:
        return {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}


class CompressionRequest(_Request):
    """The body of `POST /v1/compress`, which asks for markers of texts, with options of `marking.mark.mark_texts`."""

    input: Annotated[list[Text], Field(min_length=1, max_length=2048), OneOrMore]
    model: str | None = None
    ratio: Annotated[int, Field(ge=1)] | None = None
    token_budget: Annotated[int, Field(ge=1)] | None = None
    question: Text | None = None


def malformed_request(errors: Sequence[Any]) -> RequestError:
    """Return an error for the first of pydantic's errors in a body; it names the field, its value, and what to send."""
    found = errors[0]
    places = [str(place) for place in found["loc"] if place != "body"]
    if found["type"] == "json_invalid":
        return RequestError(400, f"the body is not JSON ({found['ctx']['error']}): send a JSON object")
    if not places:
        return RequestError(400, "the body is not a JSON object: send one, with Content-Type: application/json")
    return RequestError(400, explain_fault({**found, "loc": places}), param=places[0])
