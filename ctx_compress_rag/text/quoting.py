"""What an answer may quote: whole words of texts, token by token."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ctx_compress_rag.metrics import CHARACTER
from ctx_compress_rag.prompt import Quotable, QuotedToken
from ctx_compress_rag.text.tokenising import TextTokens, text_tokens, whole_characters

# 1,200.5 and 4:51 are a word each, and so is each character of Chinese and Japanese, which have no spaces.
_WORD = re.compile(rf"{CHARACTER.pattern}|\d+(?:[.,:]\d+)+|(?:(?!{CHARACTER.pattern})\w)+")
_SPACED = re.compile(r"\S+")


def quotable(texts: Iterable[str], tokenizer: Any) -> Quotable:
    """All quotations from texts: they begin with a word, or with a mark after a space, and end with a word or a mark.

    Args:
        texts: no quotation goes from one into another.
        tokenizer: the decoder's (a fast one: offsets are needed).
    """
    tokens: list[QuotedToken | None] = []
    starts: dict[int, list[tuple[tuple[QuotedToken, ...], int]]] = defaultdict(list)
    alone: dict[str, tuple[QuotedToken, ...]] = {}
    for text in map(whole_characters, texts):
        read, before = text_tokens(tokenizer, text), len(tokens)
        own = _quoted(text, read)
        begins = {match.start() for pattern in (_WORD, _SPACED) for match in pattern.finditer(text)}
        ends = [0, *(end for _, end in read.offsets)]
        for place, (start, end) in enumerate(read.offsets):
            first = end - len(text[start:end].lstrip())
            if first == end or first not in begins or start < ends[place]:  # the last: within a character
                continue
            starts[own[place].id].append(((), before + place))
            # A token may hold the space before its word, which has other tokens where an answer begins with it.
            last = next((i for i in range(place, len(own)) if own[i].may_end), len(own) - 1)
            word = text[first : read.offsets[last][1]]
            if word not in alone:
                alone[word] = tuple(_quoted(word, text_tokens(tokenizer, word)))
            if alone[word] and alone[word][0].id != own[place].id:
                starts[alone[word][0].id].append((alone[word], before + last + 1))
        tokens += [*own, None]
    return Quotable(tuple(tokens), dict(starts))


def _quoted(text: str, read: TextTokens) -> list[QuotedToken]:
    """A text's tokens; a quotation may end where neither a word nor, between two tokens, a character is cut."""
    within = bytearray(len(text) + 1)
    for match in _WORD.finditer(text):
        within[match.start() + 1 : match.end()] = b"\1" * (len(match[0]) - 1)
    next_starts = [start for start, _ in read.offsets[1:]] + [len(text)]
    return [
        QuotedToken(id, not within[end] and end <= after)
        for id, (_, end), after in zip(read.ids, read.offsets, next_starts, strict=True)
    ]
