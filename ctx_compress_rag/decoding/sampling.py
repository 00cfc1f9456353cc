"""Say how a decoder generates text, and what an answer holds, with its log-probabilities, also in OpenAI's formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ctx_compress_rag.decoding.filters import Scores, default_json_tokens, json_schema_text
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.strict import check_known_options, faults_raised_as

if TYPE_CHECKING:  # it imports torch
    from ctx_compress_rag.bundle.config import BundleConfig


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer, and the natural logarithm of its probability.

    The probability is the model's own, before temperature, schemas, quotations and the decoder's settings change it.
    `top` holds the likeliest tokens at the same place with their logarithms, likeliest first, as many as asked for.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class LogprobRecorder:
    """A record of the log-probabilities of an answer's tokens, and of the `top` likeliest tokens at each place."""

    def __init__(self, tokenizer: Any, top: int) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._top = top
        self._noted: list[TokenLogprob] = []

    def take(self, token: int, scores: Scores) -> None:
        """Record the token that was chosen, with the model's own scores (vocabulary,)."""
        logprobs = scores - scores.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argpartition(-logprobs, self._top - 1)[: self._top] if self._top else np.zeros(0, int)
        top = sorted(((self._text(id), float(logprobs[id])) for id in best.tolist()), key=lambda each: -each[1])
        self._noted.append(TokenLogprob(self._text(token), float(logprobs[token]), tuple(top)))

    def of_text(self, ids: Sequence[int], text: str) -> tuple[TokenLogprob, ...]:
        """Return the records of those of `ids` that make up `text`, without end tokens and tokens of a stop string."""
        length = len(ids)
        while length and len(self._decode(ids[: length - 1])) >= len(text):
            length -= 1
        return tuple(self._noted[:length])

    def _text(self, token: int) -> str:
        """Return a token's text, with the space that some tokenizers leave out at the beginning of a text."""
        return self._decode([*self._before, token], special=True).removeprefix(self._decode(self._before))

    def _decode(self, ids: Sequence[int], special: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def logprobs_from_openai(logprobs: Any, top: int) -> list[TokenLogprob]:
    """Return a TokenLogprob per token, with its `top` likeliest, from OpenAI's completions format, or [] from None."""
    if logprobs is None:
        return []
    likeliest = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return [
        TokenLogprob(token, logprob, tuple(sorted((others or {}).items(), key=lambda each: -each[1])[:top]))
        for token, logprob, others in zip(logprobs.tokens, logprobs.token_logprobs, likeliest, strict=True)
    ]


def openai_completion_logprobs(logprobs: Sequence[TokenLogprob]) -> Mapping[str, Any]:
    """Return log-probabilities in the format of OpenAI's completions."""
    ends = list(accumulate((len(each.token) for each in logprobs), initial=0))
    return {
        "tokens": [each.token for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [dict(each.top) for each in logprobs] if any(each.top for each in logprobs) else None,
        "text_offset": ends[:-1],
    }


def openai_chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Mapping[str, Any]:
    """Return log-probabilities in the format of OpenAI's chat completions."""
    return {
        "content": [
            _entry(each.token, each.logprob) | {"top_logprobs": [_entry(*one) for one in each.top]} for each in logprobs
        ]
    }


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}


FinishReason = Literal["stop", "length"]
# Short and few, since after every token the text's end is compared with the beginnings of each.
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]


def _several(value: object) -> object:
    """Return one string, a list of strings or None as a tuple, and anything else unchanged, for pydantic to refuse."""
    if isinstance(value, str):
        return (value,)
    return tuple(value or ()) if isinstance(value, list | None) else value


class SamplingOptions(BaseModel):
    """Options of an answer, which the frameworks' LLM classes and the server's requests have, too.

    A number may have another form, such as 1 for 1.0, and 16.0 or "16" for 16.

    Attributes:
        max_tokens: most tokens of an answer.
        temperature: how random tokens are; 0 always takes the likeliest token (greedy).
        top_p: sample from the likeliest tokens, up to this total probability.
        top_k: sample from this many of the likeliest tokens; 0 or -1 for all.
        stop: strings that end the answer and are left out of it, 16 at most.
        seed: makes sampling repeatable in any batch; None draws a new seed for each answer.
        extractive: make the answer a quotation, which is consecutive whole words of the prompt's passages or of an
            earlier answer. In a prompt without markers, what looks like question or template is left out. If nothing
            is left to quote, the answer is free.
        logprobs: also return the log-probability of each token.
        top_logprobs: with `logprobs`, how many of the likeliest tokens at each place to add, 20 at most.
        decoder_settings: apply the decoder's own `generation_config` (`repetition_penalty`, `suppress_tokens`,
            `stop_strings`, ...) as transformers does, but never its settings of sampling.
    """

    max_tokens: Annotated[int, Field(ge=1)] = 512
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    stop: Annotated[tuple[_Stop, ...], Field(max_length=16), BeforeValidator(_several)] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    extractive: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    decoder_settings: bool = True


OPTIONS = tuple(SamplingOptions.model_fields)


class Sampling(SamplingOptions):
    """Options that say how an answer's tokens are chosen and when the answer ends; they cannot be changed.

    Attributes:
        json_schema: make the answer JSON of this schema (a dict, or its JSON), if it ends before `max_tokens`.

    Raises ConfigError if an option is unknown, or has an impossible value.
    """

    model_config = ConfigDict(frozen=True)

    json_schema: Annotated[str, BeforeValidator(json_schema_text)] | None = None

    def __init__(self, **options: Any) -> None:
        check_known_options("Sampling", options, type(self).model_fields)
        with faults_raised_as(ConfigError):
            super().__init__(**options)
        if self.extractive and self.json_schema is not None:
            raise ConfigError("an extractive answer cannot be JSON of a schema: leave out extractive or json_schema")
        if self.top_logprobs and not self.logprobs:
            raise ConfigError(f"top_logprobs={self.top_logprobs} needs logprobs=True: give both")


def sampling_with_defaults(
    given: Mapping[str, Any], config: BundleConfig, *, max_tokens: int, extractive: bool
) -> dict[str, Any]:
    """Return the options `given` with defaults; JSON is not extractive, and short if quotations suit the bundle."""
    is_json = given.get("json_schema") is not None
    if is_json and config.extractive:
        max_tokens = min(max_tokens, default_json_tokens(config.name))
    return {"max_tokens": max_tokens, "extractive": extractive and not is_json, **given}


@dataclass(frozen=True)
class Generation:
    """A decoder's answer to a prompt.

    Attributes:
        text: the text, cut before a stop string, without special tokens.
        prompt_tokens: length of the prompt, where each slot counts as one token.
        slots: how many of the prompt's tokens were slots.
        completion_tokens: number of generated tokens, including the end token.
        finish_reason: "stop" after an end token or stop string, "length" at `max_tokens` or the window's end.
        logprobs: the log-probability of each token of the text; None if nobody asked for them.
    """

    text: str
    prompt_tokens: int
    slots: int
    completion_tokens: int
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None


Put = Callable[[str | Generation | BaseException], object]
"""A caller's function, which gets pieces of text, then the whole Generation or the error that ended the answer."""
