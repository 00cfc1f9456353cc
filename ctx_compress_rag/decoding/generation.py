"""How a decoder is asked to generate text, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, Field, TypeAdapter

from ctx_compress_rag.decoding.logprobs import TokenLogprob
from ctx_compress_rag.decoding.structured import schema_text
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.strict import validate

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to end.

    Numbers may have another form: 1 for 1.0, 16.0 or "16" for 16.

    Attributes:
        max_new_tokens: most tokens to generate.
        temperature: 0 takes the likeliest token (greedy).
        top_p: sample from the likeliest tokens that together have this probability.
        top_k: sample from this many likeliest tokens; 0 is off.
        stop: strings before which the text ends; they are not part of it.
        seed: makes each prompt's text reproducible, whatever else is in its batch.
        extractive: the text is a quotation: consecutive whole words of the prompt or of a passage that one of its
            markers stands for.
        logprobs: also return the log-probability of each token.
        top_logprobs: how many of the likeliest tokens at each place to return with it; needs `logprobs`.
        decoder_settings: apply the decoder's own settings (`repetition_penalty`, `no_repeat_ngram_size`,
            `bad_words_ids`, `suppress_tokens`, `stop_strings`, ... of its `generation_config`), as transformers does.
        json_schema: the text is JSON of this schema (a dict, or JSON), if it ends before `max_new_tokens`.

    Raises:
        ConfigError: a value is impossible.
    """

    max_new_tokens: Annotated[int, Field(ge=1)] = 512
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None  # what torch's generators take
    extractive: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    decoder_settings: bool = True
    json_schema: Annotated[str, BeforeValidator(schema_text)] | None = None

    def __post_init__(self) -> None:
        for name, rule in _rules().items():
            object.__setattr__(self, name, validate(name, getattr(self, name), rule))
        if self.extractive and self.json_schema is not None:
            raise ConfigError("an extractive answer cannot be JSON of a schema: leave out extractive or json_schema")
        if self.top_logprobs and not self.logprobs:
            raise ConfigError(f"top_logprobs={self.top_logprobs} needs logprobs=True: give both")


@cache
def _rules() -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(Sampling, include_extras=True)
    return {field.name: TypeAdapter(hints[field.name]) for field in fields(Sampling)}


@dataclass(frozen=True)
class Generation:
    """A decoder's answer to a prompt.

    Attributes:
        text: the text, cut before a stop string, without special tokens.
        prompt_tokens: length of the prompt, each slot counted as one token.
        slots: how many of the prompt's tokens were slots.
        completion_tokens: tokens generated, including the end token.
        finish_reason: "stop" after an end token or stop string, "length" if the token budget or window ran out.
        logprobs: the log-probability of each token of the text, if they were asked for.
    """

    text: str
    prompt_tokens: int
    slots: int
    completion_tokens: int
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None


Put = Callable[[str | Generation | BaseException], object]
"""Called with pieces of text, then with the whole Generation or the error that ended it."""
