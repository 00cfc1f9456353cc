"""Restrict an answer to JSON of a given schema."""

import json
import logging
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ctx_compress_rag.decoding.settings import Scores
from ctx_compress_rag.errors import ConfigError, needs, short_repr

logger = logging.getLogger(__name__)

_NO_SPACE = {"add_prefix_space": False, "prepend_scheme": "never"}
# A small decoder that may write extra white space writes nothing else.
_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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
    """Return `schema` without fields that it does not name, because a small decoder never stops adding such fields."""
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
    return ConfigError(f"json_schema={schema[:80]}: {said}")


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
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
