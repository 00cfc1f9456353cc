"""Tokenize the text of users and documents without control tokens, whatever the text spells.

Chat formats write roles as control tokens, such as `<|system|>` or `</s>`, and a tokenizer makes a control token
wherever a text spells one. In a question, a passage or metadata the letters must stay text. So such a text is cut
inside each control token, and its parts are tokenized separately. Other texts are tokenized as usual.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ctx_compress_rag.errors import ConfigError

T = TypeVar("T")
_SURROGATES = re.compile("[\ud800-\udfff]")
_CHARACTERS_PER_TOKEN = 32  # no prompt has so many on average; English has four


@dataclass(frozen=True)
class TextTokens:
    """The tokens of a text, and where they are in the text."""

    ids: list[int]
    offsets: list[tuple[int, int]]  # start and end of each token in the text, in characters


def control_token_ids(tokenizer: Any) -> set[int]:
    """Return the ids of control tokens: added tokens that are marked as special or neither words nor white space."""
    # The mark alone is not enough: `</s>` of Phi-3 and the roles of DeepSeek lack it.
    return {
        id
        for id, token in tokenizer.added_tokens_decoder.items()
        if len(token.content) > 1 and (token.special or not (token.content[0].isalnum() or token.content.isspace()))
    }


def check_text_length(what: str, characters: int, window: int | None) -> None:
    """Raise ConfigError ("`what` has ...") for over 32 characters per token of a model's window (None: no limit)."""
    if window is not None and characters > window * _CHARACTERS_PER_TOKEN:
        raise ConfigError(f"{what} has {characters} characters, too many for a window of {window} tokens: shorten it")


def replace_surrogates(text: str) -> str:
    """Return a text with U+FFFD for each lone surrogate (half of a cut emoji), because tokenizers refuse surrogates."""
    return _SURROGATES.sub("\ufffd", text)


def length_batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the indices of rows, shortest first, in batches of up to `most` tokens, padded; a longer row is alone."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return batched(order, lambda batch: len(batch) * lengths[batch[-1]] <= most)


def batched(items: Iterable[T], fits: Callable[[list[T]], bool]) -> Iterator[list[T]]:
    """Yield the items in order, in batches that are as long as they fit; an item that fits none has its own."""
    batch: list[T] = []
    for item in items:
        if batch and not fits([*batch, item]):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def bos_token_id(tokenizer: Any) -> int | None:
    """Return the id of the BOS token that the tokenizer puts before a text, or None if it puts none."""
    ids: list[int] = tokenizer("", verbose=False)["input_ids"]
    return ids[0] if ids and ids[0] == tokenizer.bos_token_id else None


def text_parts(tokenizer: Any, text: str) -> list[str]:
    """Cut a text into parts (mostly one) in which the tokenizer finds no control token; joined, they are the text."""
    return [part for part, _ in _tokenized(tokenizer, replace_surrogates(text), control_token_ids(tokenizer))]


def between_controls(tokenizer: Any, text: str) -> list[tuple[str, TextTokens]]:
    """Return the parts of a text (mostly one) between the control tokens that it spells, each with its tokens."""
    text = replace_surrogates(text)
    tokens = _encoded(tokenizer, text)
    spans = _control_spans(tokenizer, text, tokens, control_token_ids(tokenizer))
    if not spans:
        return [(text, tokens)]
    bounds = [0, *(place for span in spans for place in span), len(text)]
    parts = [text[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
    return [(part, text_tokens(tokenizer, part)) for part in parts]


def text_tokens(tokenizer: Any, text: str) -> TextTokens:
    """Return the tokens of a text alone, without BOS and control tokens. The tokenizer must be a fast one."""
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    start = 0
    for part, tokens in _tokenized(tokenizer, replace_surrogates(text), control_token_ids(tokenizer)):
        ids += tokens.ids
        offsets += [(start + a, start + b) for a, b in tokens.offsets]
        start += len(part)
    return TextTokens(ids, offsets)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    return text_tokens(tokenizer, text).ids


def _tokenized(tokenizer: Any, text: str, controls: Collection[int]) -> Iterator[tuple[str, TextTokens]]:
    tokens = _encoded(tokenizer, text)
    spans = _control_spans(tokenizer, text, tokens, controls)
    cuts = [0, *(end - len(text[start:end].lstrip()) + 1 for start, end in spans)]
    if len(cuts) == 1:
        yield text, tokens
        return
    for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        if start < end:
            yield from _tokenized(tokenizer, text[start:end], controls)


def _encoded(tokenizer: Any, text: str) -> TextTokens:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return TextTokens(encoded["input_ids"], [(a, b) for a, b in encoded["offset_mapping"]])


def _control_spans(tokenizer: Any, text: str, tokens: TextTokens, controls: Collection[int]) -> list[tuple[int, int]]:
    # Only the tokenizer knows where it reads a control token: it may normalize first, or include spaces.
    return [
        (start, end)
        for id, (start, end) in zip(tokens.ids, tokens.offsets, strict=True)
        if id in controls and not _is_unknown(tokenizer, id, text[start:end])
    ]


def _is_unknown(tokenizer: Any, id: int, span: str) -> bool:
    # Characters that a tokenizer does not know become its unknown token, however they are cut.
    return bool(id == tokenizer.unk_token_id) and span.strip().casefold() != tokenizer.unk_token.casefold()
