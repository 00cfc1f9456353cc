"""Requests: OpenAI's chat completions and completions as far as a local decoder serves them, and compress.

Unsupported options that would change the answer are refused by name; options that only describe the client are accepted
and ignored.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from ctx_compress_rag.decoding.decoder import Message, Sampling


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is not a character: decode the text again") from None
    return text


def _schema(schema: dict[str, Any]) -> str:
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deeply: make it flatter") from None
    if len(text) > _SCHEMA_CHARACTERS:
        raise ValueError(f"the schema has {len(text)} characters and {_SCHEMA_CHARACTERS} are allowed: make it smaller")
    return text


def _zero(value: object) -> object:
    return 0 if value == 0 else value  # 0.0, which no literal can be


def _kind(value: object) -> str:
    return "(list)" if isinstance(value, list) else "(text)"


Text = Annotated[str, AfterValidator(_unicode)]
# Tags choose one branch by the type that was sent, so that an error in a list is not reported as "not a string".
OneText = Annotated[Text, Tag("(text)")]
# Short, since after every token the answer's end is compared with the beginnings of each.
Stop = Annotated[str, Field(max_length=1000), AfterValidator(_unicode)]
List = Tag("(list)")
EITHER = Discriminator(_kind)
Zero = Annotated[Literal[0], BeforeValidator(_zero)]

_SCHEMA_CHARACTERS = 1 << 16  # reading one of this length takes half a second, in which everyone waits

_ROLES = {"developer": "system"}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Request):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Request):
    """A message; its text may hold markers."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[OneText | Annotated[list[TextPart], List], EITHER]
    name: str | None = None

    def as_message(self) -> Message:
        """As the decoder takes it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": _ROLES.get(self.role, self.role), "content": content}


class StreamOptions(_Request):
    """What a stream holds besides text."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class TextFormat(_Request):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(_Request):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Request):
    """A JSON schema, enforced with or without `strict`."""

    text: Annotated[dict[str, Any], AfterValidator(_schema), Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonFormat(_Request):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Generate(_Request):
    """What chat completions and completions have in common."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # not OpenAI's; -1 is vLLM's value for all tokens
    stop: (
        Annotated[Annotated[Stop, Tag("(text)")] | Annotated[list[Stop], Field(max_length=16), List], EITHER] | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    extractive: bool | None = None  # not OpenAI's
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling(self, default: int, most: int | None = None) -> Sampling:
        """How to answer: with at most `default` tokens if the client gives no limit, and never more than `most`."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            max_new_tokens=min(self.longest or default, most or sys.maxsize),
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            stop=stop,
            seed=self.seed,
            extractive=self.extractive or False,
            json_schema=self.schema_wanted,
        )

    @property
    def longest(self) -> int | None:
        """The longest answer that the client wants."""
        return self.max_tokens

    @property
    def schema_wanted(self) -> str | None:
        """The schema, as JSON, that the answer has to fit; None for text."""
        return None

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatCompletion(Generate):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: Annotated[TextFormat | ObjectFormat | JsonFormat, Field(discriminator="type")] | None = None
    modalities: list[Literal["text"]] | None = None
    logprobs: Literal[False] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def longest(self) -> int | None:
        """The longest answer that the client wants."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def schema_wanted(self) -> str | None:
        """The schema, as JSON, that the answer has to fit; None for text."""
        match self.response_format:
            case JsonFormat(json_schema=named):
                return str(named.text)
            case ObjectFormat():
                return '{"type": "object"}'
        return None

    def prompt(self) -> list[Message]:
        """The chat."""
        return [message.as_message() for message in self.messages]


class Completion(Generate):
    """`POST /v1/completions`: raw prompts, no chat template."""

    prompt: Annotated[OneText | Annotated[list[Text], Field(min_length=1, max_length=128), List], EITHER]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: Literal[0] | None = None
    suffix: Literal[""] | None = None

    def prompts(self) -> list[str]:
        """The prompts, one choice each."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class Compress(_Request):
    """`POST /v1/compress`: markers for texts; missing ones are compressed.

    Attributes:
        input: one text or several.
        ratio: source tokens per slot, the store's own by default; with a RAM bundle, how many times shorter.
        token_budget: in place of a ratio, the maximum number of tokens for all texts together.
        question: what is asked, for RAM bundles.
    """

    input: Annotated[OneText | Annotated[list[Text], Field(min_length=1, max_length=2048), List], EITHER]
    model: str | None = None
    ratio: Annotated[int, Field(ge=1)] | None = None
    token_budget: Annotated[int, Field(ge=1)] | None = None
    question: Text | None = None

    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input
