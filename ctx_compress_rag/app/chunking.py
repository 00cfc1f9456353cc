"""Text into passages of at most so many tokens, at paragraphs and sentences where it can be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

_PARAGRAPH_END = re.compile(r"\n[ \t]*\n\s*")
# Also after the full stop, exclamation and question mark of Chinese and Japanese, which no space follows.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[\u3002\uff01\uff1f])|\n")
_SPACE = re.compile(r"\s+")
_HEADING = re.compile(r"#{1,6}\s")


def chunk(text: str, tokenizer: Any, max_tokens: int, *, markdown: bool = False) -> list[str]:
    """Cut a text into passages, in order; all of it but the space between passages is kept.

    Paragraphs are packed together as long as they fit. A paragraph that alone is too long is cut at
    sentences, a sentence at spaces, a word anywhere.

    Args:
        text: the text.
        tokenizer: the decoder's transformers tokenizer.
        max_tokens: most tokens of a passage, counted without special tokens; at least 8.
        markdown: start a new passage at each heading.
    """
    pieces = [
        piece for paragraph in _split(text, _PARAGRAPH_END) for piece in _fitting(paragraph, tokenizer, max_tokens)
    ]
    counts = _counts(pieces, tokenizer)
    passages: list[str] = []
    start = 0
    while start < len(pieces):
        end, size = start + 1, counts[start]
        while end < len(pieces) and size + counts[end] <= max_tokens and not (markdown and _closes(pieces, start, end)):
            size += counts[end]
            end += 1
        passage = "".join(pieces[start:end]).strip()
        # Tokens may join otherwise across pieces than within them: count what is kept, not what was meant.
        while end - start > 1 and _counts([passage], tokenizer)[0] > max_tokens:
            end -= 1
            passage = "".join(pieces[start:end]).strip()
        passages.append(passage)
        start = end
    return [passage for passage in passages if passage]


def _closes(pieces: list[str], start: int, end: int) -> bool:
    """Whether a heading at `end` ends the passage begun at `start`; headings that follow each other stay together."""
    return bool(_HEADING.match(pieces[end])) and not all(_HEADING.match(piece) for piece in pieces[start:end])


def _split(text: str, boundary: re.Pattern[str]) -> list[str]:
    """Parts that each end after a boundary; joined, they are the text."""
    ends = [match.end() for match in boundary.finditer(text) if match.end()]
    bounds = [0, *ends, len(text)]
    return [text[a:b] for a, b in pairwise(bounds) if b > a]


def _fitting(paragraph: str, tokenizer: Any, max_tokens: int) -> Iterator[str]:
    """The paragraph if it fits, else its sentences, else halves of them."""
    if _counts([paragraph.strip()], tokenizer)[0] <= max_tokens:
        yield paragraph
        return
    for sentence in _split(paragraph, _SENTENCE_END):
        yield from _halves(sentence, tokenizer, max_tokens)


def _halves(text: str, tokenizer: Any, max_tokens: int) -> Iterator[str]:
    """The text, halved at the space nearest its middle (or in the middle) until each part fits."""
    if len(text) < 2 or _counts([text.strip()], tokenizer)[0] <= max_tokens:
        yield text
        return
    middle = len(text) // 2
    cuts = [match.end() for match in _SPACE.finditer(text) if match.end() < len(text)]
    cut = min(cuts, key=lambda place: abs(place - middle)) if cuts else middle
    yield from _halves(text[:cut], tokenizer, max_tokens)
    yield from _halves(text[cut:], tokenizer, max_tokens)


def _counts(texts: list[str], tokenizer: Any) -> list[int]:
    if not texts:
        return []
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
