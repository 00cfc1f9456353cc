"""Cut text into passages of limited length, at paragraphs and sentences if possible."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

_PARAGRAPH_END = re.compile(r"\n[ \t]*\n\s*")
# Also after the full stop, exclamation and question mark of Chinese and Japanese, which no space follows.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[\u3002\uff01\uff1f])|\n")
_SPACE = re.compile(r"\s+")
_HEADING = re.compile(r"#{1,6}\s")
_COUNTED_TOGETHER = 64


def chunk(text: str, tokenizer: Any, max_tokens: int, *, markdown: bool = False) -> Iterator[str]:
    """Cut a text into passages, lazily and in order; only white space between passages is dropped.

    Paragraphs are packed together as long as they fit. A paragraph that is too long by itself is
    cut at sentences, a sentence at spaces, a word anywhere.

    Args:
        text: the text.
        tokenizer: the decoder's transformers tokenizer.
        max_tokens: maximum tokens of a passage, counted without special tokens; at least 8.
        markdown: start a new passage at each heading.
    """
    held: list[tuple[str, int]] = []  # pieces of the next passage, and their token counts
    for piece in _pieces(text, tokenizer, max_tokens):
        while held and (sum(n for _, n in held) + piece[1] > max_tokens or (markdown and _closes(held, piece[0]))):
            passage, held = _packed(held, tokenizer, max_tokens)
            if passage:
                yield passage
        held.append(piece)
    while held:
        passage, held = _packed(held, tokenizer, max_tokens)
        if passage:
            yield passage


def _pieces(text: str, tokenizer: Any, max_tokens: int) -> Iterator[tuple[str, int]]:
    """Paragraphs or parts of them that fit, with their token counts; a big text is tokenized only as needed."""
    pieces = (
        piece for paragraph in _split(text, _PARAGRAPH_END) for piece in _fitting(paragraph, tokenizer, max_tokens)
    )
    while group := list(islice(pieces, _COUNTED_TOGETHER)):
        yield from zip(group, _counts(group, tokenizer), strict=True)


def _packed(held: list[tuple[str, int]], tokenizer: Any, max_tokens: int) -> tuple[str, list[tuple[str, int]]]:
    """A passage made of the pieces, and the pieces that did not fit."""
    end = len(held)
    passage = "".join(piece for piece, _ in held).strip()
    # Joined pieces may have more tokens than the pieces counted one by one: count the joined text.
    while end > 1 and _counts([passage], tokenizer)[0] > max_tokens:
        end -= 1
        passage = "".join(piece for piece, _ in held[:end]).strip()
    return passage, held[end:]


def _closes(held: list[tuple[str, int]], piece: str) -> bool:
    """Whether a piece is a heading that ends the passage before it; headings that follow each other stay together."""
    return bool(_HEADING.match(piece)) and not all(_HEADING.match(before) for before, _ in held)


def _split(text: str, boundary: re.Pattern[str]) -> Iterator[str]:
    """Parts that each end after a boundary; joined, they are the text."""
    start = 0
    for match in boundary.finditer(text):
        if match.end() > start:
            yield text[start : match.end()]
            start = match.end()
    if start < len(text):
        yield text[start:]


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
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
