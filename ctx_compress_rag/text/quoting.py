"""The quotations (whole words of texts) that an extractive answer may be, token by token."""

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

from ctx_compress_rag.prompt import Quotable, QuotedToken
from ctx_compress_rag.text.answers import WORD
from ctx_compress_rag.text.tokenizing import TextTokens, between_controls, text_tokens

_SPACED = re.compile(r"\S+")
_BLANK_LINE = re.compile(r"\n\s*\n")


def find_quotations(texts: Iterable[str], tokenizer: Any) -> Quotable:
    """Return all quotations from texts. Each starts at a word, or punctuation after a space, and ends with one of them.

    None ends within a token, so Chinese characters that share a token are quoted together. None spans two texts, a
    blank line (which is between passages), or letters that spell a control token. The tokenizer must be a fast one,
    because token offsets are needed.
    """
    tokens: list[QuotedToken | None] = []
    starts: dict[int, list[tuple[tuple[QuotedToken, ...], int]]] = defaultdict(list)
    alone: dict[str, tuple[QuotedToken, ...]] = {}
    for text, read in chain.from_iterable(between_controls(tokenizer, text) for text in texts):
        before = len(tokens)
        own = _quoted(text, tokenizer, read)
        begins = {match.start() for pattern in (WORD, _SPACED) for match in pattern.finditer(text)}
        ends = [0, *(end for _, end in read.offsets)]
        for place, (token, (start, end)) in enumerate(zip(own, read.offsets, strict=True)):
            if token is None or start < ends[place]:  # the second case: within a character
                continue
            last = place + token.to_end
            for first in begins.intersection(range(start, end)):
                own_start = not text[start:first].strip()
                if own_start:
                    starts[token.id].append(((), before + place))
                # A token may also hold what precedes its word: the word has other tokens at the start of an answer.
                word = text[first : read.offsets[last][1]]
                if word not in alone:
                    alone[word] = _alone(word, tokenizer)
                if alone[word] and not (own_start and alone[word][0].id == token.id):
                    starts[alone[word][0].id].append((alone[word], before + last + 1))
        tokens += [*own, None]
    return Quotable(tuple(tokens), dict(starts))


def _alone(word: str, tokenizer: Any) -> tuple[QuotedToken, ...]:
    """Return the tokens of a word at the start of an answer, empty if the word cannot be quoted."""
    tokens = _quoted(word, tokenizer, text_tokens(tokenizer, word))
    return tuple(token for token in tokens if token is not None) if None not in tokens else ()


def _quoted(text: str, tokenizer: Any, read: TextTokens) -> list[QuotedToken | None]:
    """Return a text's tokens. A quotation may end where it cuts neither a word nor a character that two tokens share.

    None stands for an unknown token, the end of a blank line, and tokens after which no quotation can end before one.
    """
    within = bytearray(len(text) + 1)
    for match in WORD.finditer(text):
        within[match.start() + 1 : match.end()] = b"\1" * (len(match[0]) - 1)
    blank = {match.end() - 1 for match in _BLANK_LINE.finditer(text)}
    quoted: list[QuotedToken | None] = []
    to_end, after = None, len(text)
    for id, (start, end) in reversed(list(zip(read.ids, read.offsets, strict=True))):
        if id == tokenizer.unk_token_id or blank.intersection(range(start, end)):
            to_end = None
        elif not within[end] and end <= after:
            to_end = 0
        elif to_end is not None:
            to_end += 1
        quoted.append(None if to_end is None else QuotedToken(id, to_end))
        after = start
    return quoted[::-1]
