"""How a decoder generates text: settings, seeded sampling, and where a text ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

import torch
from pydantic import BeforeValidator, Field, TypeAdapter
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ctx_compress_rag.decoding.logprobs import Recorder, TokenLogprob
from ctx_compress_rag.decoding.quoting import QuoteProcessor
from ctx_compress_rag.decoding.settings import of_decoder, own_settings
from ctx_compress_rag.decoding.structured import JsonProcessor, schema_text
from ctx_compress_rag.errors import ConfigError, short_repr
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.strict import checked

FinishReason = Literal["stop", "length"]

_COLDEST = 1e-6
"""Below this temperature the likeliest token is always taken: float32 logits that differ do so by more than this.

Divided by a much smaller number, they would all become infinite.
"""

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
"""The names of `Sampling`'s fields in the frameworks' LLM classes, in constructors and calls."""


def given_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """An LLM class's constructor fields: None leaves a field to its default, and `stop` is a list."""
    given = {name: value for name, value in fields.items() if value is not None}
    return given | ({"stop": [given["stop"]]} if isinstance(given.get("stop"), str) else {})


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
            object.__setattr__(self, name, checked(name, getattr(self, name), rule))
        if self.extractive and self.json_schema is not None:
            raise ConfigError("an extractive answer cannot be JSON of a schema: leave out extractive or json_schema")
        if self.top_logprobs and not self.logprobs:
            raise ConfigError(f"top_logprobs={self.top_logprobs} needs logprobs=True: give both")

    @classmethod
    def of(cls, llm: object, given: Mapping[str, Any]) -> Sampling:
        """Make the sampling of one call.

        Args:
            llm: a framework's LLM, with `OPTIONS` as attributes.
            given: options of the call; None means the LLM's own. Besides `OPTIONS`, OpenAI's `response_format`:
                {"type": "json_schema", "json_schema": {"schema": ...}}.

        Raises:
            ConfigError: an option is unknown, or a value impossible.
        """
        given = dict(given)
        schema = _schema_of(given.pop("response_format", None))
        if unknown := sorted(given.keys() - set(OPTIONS)):
            raise ConfigError(
                f"{type(llm).__name__} has no option {unknown[0]!r} for a call: there are {', '.join(OPTIONS)}"
            )
        own = {name: getattr(llm, name) for name in OPTIONS}
        chosen = own | {name: value for name, value in given.items() if value is not None}
        max_tokens, stop = chosen.pop("max_tokens"), chosen.pop("stop")
        return cls(
            max_new_tokens=checked("max_tokens", max_tokens, _rules()["max_new_tokens"]),
            stop=(stop,) if isinstance(stop, str) else stop or (),
            json_schema=schema,
            **chosen,
        )

    def room(self, prompt: int, window: int | None) -> int:
        """Most new tokens after a prompt of this many tokens, in a model's window."""
        return self.max_new_tokens if window is None else min(self.max_new_tokens, window - prompt)


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


def end_ids(tokenizer: Any, model_ids: int | list[int] | None, stop: Sequence[str]) -> set[int]:
    """Tokens that end an answer: the model's, the tokenizer's, and special stop strings, which no decoded text has.

    Args:
        tokenizer: the decoder's.
        model_ids: `eos_token_id` of the model's generation config.
        stop: stop strings.
    """
    ids = {tokenizer.eos_token_id, *(model_ids if isinstance(model_ids, list) else [model_ids])}
    special = tokenizer.get_added_vocab()
    return {i for i in ids if i is not None} | {special[s] for s in stop if s in special}


def stop_strings(sampling: Sampling, model: Any) -> tuple[str, ...]:
    """What ends an answer: the sampling's strings, and those of the decoder's own settings if they act."""
    own = own_settings(model.generation_config).get("stop_strings", ()) if sampling.decoder_settings else ()
    return (*sampling.stop, *([own] if isinstance(own, str) else own))


def processors(
    sampling: Sampling,
    model: Any,
    tokenizer: Any,
    ends: Collection[int],
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    recorder: Recorder | None,
) -> LogitsProcessorList:
    """All logits processors of an answer: what notes log-probabilities, the decoder's own settings, then `choosers`.

    The arguments are those of `choosers`, the model that answers, and what notes log-probabilities.

    Raises:
        ConfigError: the JSON schema cannot be enforced, or a setting of the decoder is not supported.
    """
    own = of_decoder(model.generation_config, ends, model.device) if sampling.decoder_settings else []
    noting = [] if recorder is None else [recorder]
    return LogitsProcessorList([*noting, *own, *choosers(sampling, tokenizer, ends, prompts, limits)])


def choosers(
    sampling: Sampling, tokenizer: Any, ends: Collection[int], prompts: Sequence[Prompt], limits: Sequence[int]
) -> LogitsProcessorList:
    """Make logits processors after which the likeliest token is the one to take, also when sampling.

    Args:
        sampling: how tokens are chosen.
        tokenizer: the decoder's.
        ends: tokens that end an answer.
        prompts: what each row answers.
        limits: most new tokens of each row.

    Raises:
        ConfigError: the JSON schema cannot be enforced.
    """
    processors = LogitsProcessorList()
    if sampling.json_schema is not None:
        processors.append(JsonProcessor(sampling.json_schema, tokenizer, ends, len(prompts)))
    if sampling.extractive:
        processors.append(QuoteProcessor([p.quotable for p in prompts if p.quotable is not None], ends, limits))
    if sampling.temperature < _COLDEST:
        return processors
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(_GumbelNoise(sampling.seed, len(prompts)))
    return processors


class _GumbelNoise(LogitsProcessor):
    """Adds Gumbel noise, so that argmax samples from softmax.

    transformers samples with torch's global random state, which other threads (such as a stream's) also
    use, so that none is reproducible. Here each row has its own generator, on the CPU, so that a seed
    gives the same result on any device and in any batch.
    """

    def __init__(self, seed: int | None, rows: int) -> None:
        self._generators = [torch.Generator() for _ in range(rows)]
        for generator in self._generators:
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        noise = torch.stack([torch.empty(scores.shape[-1]).exponential_(generator=g) for g in self._generators])
        # -log of an exponential variable is Gumbel; the clamp keeps -inf (excluded tokens) from becoming NaN.
        return scores - noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_().to(scores.device)


class TextWatch(StoppingCriteria):
    """Follows a batch during generation: ends rows, and passes on the text of row 0 as soon as it is final.

    Args:
        tokenizer: the decoder's.
        stop: stop strings.
        end_ids: tokens that end a row.
        limits: most new tokens of each row.
        on_text: called with each new piece of row 0; never part of a stop string or of a character.
        canceled: called at every token; True ends all rows.
        recorder: notes the log-probabilities of the tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        end_ids: Collection[int],
        limits: Sequence[int],
        on_text: Callable[[str], object] | None = None,
        canceled: Callable[[], bool] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._end_ids = end_ids
        self._limits = limits
        self._on_text = on_text
        self._canceled = canceled
        self._recorder = recorder
        self._sent = 0
        self.done: list[tuple[str, int, FinishReason, tuple[TokenLogprob, ...] | None] | None] = [None for _ in limits]
        """Text, tokens, finish reason and log-probabilities of each row that has ended."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Which rows end. `input_ids` (rows, new tokens) holds no prompt, because prompts come as embeddings."""
        generated: Tensor = input_ids
        if self._canceled is not None and self._canceled():
            return torch.ones(generated.shape[0], dtype=torch.bool, device=generated.device)
        for row, ids in enumerate(generated.tolist()):
            if self.done[row] is None:
                self.look(row, ids)
        return torch.tensor([row is not None for row in self.done], device=generated.device)

    def look(self, row: int, ids: Sequence[int]) -> None:
        """Follow one row by all its new tokens so far."""
        if self._recorder is not None:
            self._recorder.take(row, ids[-1])
        ended, full = ids[-1] in self._end_ids, len(ids) >= self._limits[row]
        if not (ended or full or self._stop or self._on_text):
            return
        text = self.decode(ids[:-1] if ended else ids)
        cut = min((at for at in map(text.find, self._stop) if at >= 0), default=None)
        if cut is not None:
            text = text[:cut]
        if cut is not None or ended or full:
            logprobs = None if self._recorder is None else self._recorder.of_text(row, ids, text)
            self.done[row] = (text, len(ids), "stop" if cut is not None or ended else "length", logprobs)
        if self._on_text is not None and row == 0:
            safe = len(text) if self.done[row] else self._certain(text)
            if safe > self._sent:
                self._on_text(text[self._sent : safe])
                self._sent = safe

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _certain(self, text: str) -> int:
        """Length of the beginning of `text` that no later token can change."""
        text = text.rstrip("\ufffd")  # bytes of a character whose other bytes are still to come
        held = (n for stop in self._stop for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
        return len(text) - max(held, default=0)
