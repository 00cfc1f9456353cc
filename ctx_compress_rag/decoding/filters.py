"""Restrict an answer's tokens: by the decoder's own settings, to JSON of a schema, or to quotations.

Publishers put settings into a decoder's `generation_config`. Those that change scores, and `stop_strings`, act in every
answer, as in transformers' `generate`. Those that choose tokens (`do_sample`, `temperature`, `top_p`, ...) do not,
because `Sampling` has them.

Quotations are of the prompt or its passages: slots tell a decoder roughly what a passage says, so it misspells names
and numbers, and the store has the exact text.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.errors import ConfigError, needs, short_repr
from ctx_compress_rag.prompt import Quotable, QuotedToken

Scores = NDArray[np.float32]
Filter = Callable[[Sequence[int], Scores], Scores]
"""A function of an answer's ids so far and the scores (vocabulary,) of its next token, which returns new scores."""

# With the value of each that changes nothing, besides None.
_APPLIED: dict[str, Any] = {
    "sequence_bias": [],
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "stop_strings": [],
}
_REFUSED: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "num_beams": 1,
}


def generation_settings(config: Any) -> dict[str, Any]:
    """Return the settings in a `generation_config` that act in answers; raise ConfigError for those not supported."""
    for name, value in _given(config, _REFUSED).items():
        raise ConfigError(
            f"the decoder's generation_config has {name}={value!r}, not supported here: give decoder_settings=False"
        )
    return _given(config, _APPLIED)


def _given(config: Any, neutral: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: getattr(config, name, None) for name in neutral}
    return {name: value for name, value in values.items() if value is not None and value != neutral[name]}


def generation_filters(own: Mapping[str, Any], ends: Collection[int]) -> list[Filter]:
    """Return the filters of a decoder's own settings in transformers' order; they see an answer without its prompt."""
    endings = sorted(ends)
    made: dict[str, Callable[[Any], Filter]] = {
        "sequence_bias": lambda biases: _biased(biases.items() if isinstance(biases, Mapping) else biases),
        "repetition_penalty": lambda penalty: partial(_repeated_less, penalty),
        "no_repeat_ngram_size": lambda size: partial(_without_repeats, size),
        "bad_words_ids": lambda words: _biased((ids, -np.inf) for ids in words if list(ids) not in [[e] for e in ends]),
        "min_new_tokens": lambda count: lambda ids, scores: _without(scores, endings if len(ids) < count else []),
        "suppress_tokens": lambda tokens: lambda ids, scores: _without(scores, tokens),
        "begin_suppress_tokens": lambda tokens: lambda ids, scores: _without(scores, [] if ids else tokens),
    }
    return [made[name](value) for name, value in own.items()]


def _without(scores: Scores, tokens: Collection[int]) -> Scores:
    changed = scores.copy()
    changed[[token for token in tokens if token < len(scores)]] = -np.inf  # GLM 4's config names some beyond
    return changed


def _repeated_less(penalty: float, ids: Sequence[int], scores: Scores) -> Scores:
    changed, said = scores.copy(), list(set(ids))
    changed[said] = np.where(scores[said] < 0, scores[said] * np.float32(penalty), scores[said] / np.float32(penalty))
    return changed


def _without_repeats(size: int, ids: Sequence[int], scores: Scores) -> Scores:
    """Forbid each token that would end a sequence of `size` tokens which the answer has already."""
    last, starts = list(ids[len(ids) - size + 1 :]), range(len(ids) - size + 1)
    return _without(scores, [ids[at + size - 1] for at in starts if list(ids[at : at + size - 1]) == last])


def _biased(biases: Iterable[tuple[Sequence[int], float]]) -> Filter:
    """Add each bias to the score of its sequence's last token, where the answer ends with the tokens before it."""
    wanted = [(list(ids), bias) for ids, bias in biases]

    def biased(ids: Sequence[int], scores: Scores) -> Scores:
        changed = scores.copy()
        for (*before, last), bias in wanted:
            if not before or (len(ids) > len(before) and list(ids[-len(before) :]) == before):
                changed[last] += np.float32(bias)
        return changed

    return biased


logger = logging.getLogger(__name__)

_NO_SPACE = {"add_prefix_space": False, "prepend_scheme": "never"}
# A small decoder that may write extra white space writes nothing else.
_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}


def json_schema_text(schema: object) -> object:
    """Return a JSON schema (a dict, or its JSON) as JSON, and anything else unchanged, for pydantic to refuse."""
    return json.dumps(schema) if isinstance(schema, dict) else schema


def requested_json_schema(response_format: object) -> Any:
    """Return the JSON schema in OpenAI's `response_format`, or None for text; raise ConfigError for another form."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    wanted = '{"type": "json_schema", "json_schema": {"schema": ...}}'
    raise ConfigError(f"response_format={short_repr(response_format)}: give {wanted}")


def closed_json_schema(schema: str) -> Any:
    """Return `schema` without fields that it does not name, which a small decoder never stops adding.

    A format that llguidance does not know leaves: JSON Schema calls it a note, and pydantic writes one for `Path`.
    """
    try:
        return _closed(json.loads(schema))
    except (ValueError, RecursionError) as error:
        raise _refused(schema, error) from None


@cache
def default_json_tokens(bundle: str) -> int:
    """Return the default `max_tokens` of JSON for a bundle that answers best with quotations; warn once about JSON."""
    logger.warning(
        "bundle %r answers best with quotations: the fields of its JSON are often empty or wrong. Fill them with "
        "another model, from this one's answer",
        bundle,
    )
    return 128  # a decoder that cannot fill fields may not end them either


class JsonFilter:
    """A filter for one answer, which allows only tokens that go on with JSON of the schema."""

    def __init__(self, schema: str, tokenizer: Any, end_ids: Collection[int]) -> None:
        with needs("json"):
            from llguidance import LLMatcher
        self._schema, closed = schema, closed_json_schema(schema)
        try:
            grammar = LLMatcher.grammar_from_json_schema(closed, defaults=_FORM)
        except (ValueError, RecursionError) as error:
            raise _refused(schema, error) from None
        self._end_ids = sorted(end_ids)
        self._matcher = LLMatcher(_guide(tokenizer, tuple(self._end_ids)), grammar)
        if said := self._matcher.get_error():
            raise _refused(schema, said)

    def __call__(self, ids: Sequence[int], scores: Scores) -> Scores:
        """Return the scores (vocabulary,) of the token after `ids`, the answer so far; -inf forbids a token."""
        matcher = self._matcher
        if ids and not matcher.is_stopped():
            matcher.consume_token(ids[-1])
        mask = None if matcher.is_stopped() else matcher.compute_bitmask()
        if said := matcher.get_error():
            raise _refused(self._schema, said.partition("\n")[0])
        allowed = np.zeros(len(scores), dtype=bool)
        if mask is None:  # the JSON is complete
            allowed[[end for end in self._end_ids if end < len(scores)]] = True
        else:
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=len(scores))
            allowed[: len(bits)] = bits
        return np.where(allowed, scores, np.float32(-np.inf))


def _refused(schema: str, said: object) -> ConfigError:
    return ConfigError(f"json_schema={schema[:80]}: {said}; change the schema")


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if closed.get("type") == "string" and closed.get("format") not in _FORMATS:
        closed.pop("format", None)
    return {"additionalProperties": False, **closed} if isinstance(closed.get("properties"), dict) else closed


@lru_cache(maxsize=4)
def _guide(tokenizer: Any, end_ids: tuple[int, ...]) -> Any:
    """Return the tokenizer in llguidance's form, which takes about a second for a large vocabulary."""
    from llguidance import LLTokenizer

    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    # It tokenizes pieces of an answer, to which the tokenizer must not add a leading space.
    for part in _parts(settings.get("pre_tokenizer")):
        part |= {key: value for key, value in _NO_SPACE.items() if key in part}
    known = set(tokenizer.get_vocab().values())
    ends = [end for end in end_ids if end in known]
    return LLTokenizer(json.dumps(settings | {"padding": None, "truncation": None}), eos_token=ends)


def _parts(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])


_Run = tuple[tuple[QuotedToken, ...], int]


class QuoteFilter:
    """A filter that allows only tokens with which one answer stays a quotation of whole words within `limit` tokens."""

    def __init__(self, quotable: Quotable, end_ids: Collection[int], limit: int) -> None:
        self._tokens = quotable.tokens
        self._end_ids = sorted(end_ids)
        self._limit = limit
        # All places where the answer so far occurs in what it may quote; before its first token, all where one begins.
        self._runs: Sequence[_Run] = list(chain.from_iterable(quotable.starts.values()))
        self._may_end = False

    def __call__(self, ids: Sequence[int], scores: Scores) -> Scores:
        """Return the scores (vocabulary,) of the token after `ids`, the answer so far; -inf forbids a token."""
        if ids:
            self._take(ids[-1])
        left = self._limit - len(ids) - 1  # tokens that may follow the next one
        following = {token.id for token in map(self._next, self._runs) if token is not None and token.to_end <= left}
        ends = [end for end in self._end_ids if end < len(scores)]  # GLM 4's config names some beyond a vocabulary
        allowed = [*following, *(ends if self._may_end or not following else ())]
        masked = np.full_like(scores, -np.inf)
        masked[allowed] = scores[allowed]
        return masked

    def _take(self, id: int) -> None:
        """Continue all quotations with the token `id`; after an end token only end tokens can follow."""
        taken = [(run, token) for run in self._runs if (token := self._next(run)) is not None and token.id == id]
        self._runs = [(first[1:], place) if first else ((), place + 1) for (first, place), _ in taken]
        self._may_end = any(token.to_end == 0 for _, token in taken)

    def _next(self, run: _Run) -> QuotedToken | None:
        first, place = run
        return first[0] if first else self._tokens[place]
