"""Cut a passage into sentences, groups of sentences or parts of sentences, which become one slot each."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ctx_compress_rag.errors import needs
from ctx_compress_rag.text.tokenizing import text_tokens

# The splitter fails on white space of several bytes, such as U+0085.
_WIDE_SPACE = re.compile(r"[^\S\t\n\v\f\r ]")


class TextUnit(NamedTuple):
    """A piece of a passage, with its text, without surrounding space, and its number of the passage's tokens."""

    text: str
    tokens: int


class _Start(NamedTuple):
    """Where a piece begins, in characters and in tokens."""

    char: int
    token: int


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Return a text's sentences, which joined are the text, by the rules of sentencex for a language (ISO 639 code)."""
    with needs("sentences"):
        from sentencex import segment
    ends = accumulate(len(part) for part in segment(language, _WIDE_SPACE.sub(" ", text)))
    return [text[a:b] for a, b in pairwise([0, *ends])]


def split_units(text: str, tokenizer: Any, limit: int | None, *, merge: bool, language: str = "en") -> list[TextUnit]:
    """Cut a passage into units of at most `limit` tokens (None: no limit), with each token in one unit.

    A longer sentence is cut between words into parts of about the same length, a longer word between characters.
    White space around a unit is not in its text, and tokens of white space count for the unit before. No unit's text
    is empty, so a unit may exceed the limit because of a single character or the white space after the unit.

    With `merge`, neighbors are joined while they stay within the limit, otherwise each sentence is a unit. The
    tokenizer must be a fast one, because token offsets are needed. Raises MissingExtraError without `sentences`.
    """
    offsets = text_tokens(tokenizer, text).offsets
    if limit is None:
        limit = len(offsets)
    begins = list(_sentence_starts(text, offsets, language))
    starts = [
        part
        for start, end in pairwise([*begins, _Start(len(text), len(offsets))])
        for part in _parts(text, offsets, start, end.token, limit)
    ]
    starts = _without_blanks(text, starts)
    if merge:
        starts = _merged(starts, len(offsets), limit)
    return [
        TextUnit(text[start.char : end.char].strip(), end.token - start.token)
        for start, end in pairwise([*starts, _Start(len(text), len(offsets))])
    ]


def _sentence_starts(text: str, offsets: Sequence[tuple[int, int]], language: str) -> Iterator[_Start]:
    """Yield where sentences begin. A sentence that shares its only token with the one before is part of that one."""
    # The splitter returns runs of white space as separate sentences.
    lengths = [(len(part), bool(part.strip())) for part in split_sentences(text, language)]
    ends = accumulate(length for length, _ in lengths)
    chars = [end - length for end, (length, words) in zip(ends, lengths, strict=True) if words]
    latest = -1
    for token, (_, end) in enumerate(offsets):
        # A token is where its last character is: many tokenizers put the space before a word into the word's token.
        sentence = max(0, bisect_right(chars, end - 1) - 1)
        if sentence > latest:
            yield _Start(chars[sentence] if latest >= 0 else 0, token)
            latest = sentence


def _parts(text: str, offsets: Sequence[tuple[int, int]], start: _Start, last: int, limit: int) -> Iterator[_Start]:
    """Yield the starts of a sentence's parts of at most `limit` tokens, about equally long, at words if possible."""
    while True:
        yield start
        left = last - start.token
        if left <= limit:
            return
        even = -(-left // -(-left // limit))
        words = [t for t in range(start.token + 1, start.token + limit + 1) if _begins_word(text, offsets, t)]
        cut = min(words, key=lambda t: abs(t - start.token - even)) if words else start.token + even
        # Tokens may share a character, byte by byte: it goes with the first of them.
        start = _Start(max(offsets[cut][0], offsets[cut - 1][1]), cut)


def _begins_word(text: str, offsets: Sequence[tuple[int, int]], token: int) -> bool:
    """Whether a token begins a word, with or without the space before it."""
    start, end = offsets[token]
    if start < offsets[token - 1][1]:
        return False  # further bytes of the character that the token before began
    word = text[start:end].lstrip()
    first = end - len(word)
    return bool(word) and text[first - 1 : first].isspace()


def _without_blanks(text: str, starts: Sequence[_Start]) -> list[_Start]:
    """Return the starts that remain once each blank part is joined to the part before it (the first to the next)."""
    ends = [*(start.char for start in starts[1:]), len(text)]
    kept = [s for s, end in zip(starts, ends, strict=True) if s.token == 0 or text[s.char : end].strip()]
    if len(kept) > 1 and not text[: kept[1].char].strip():
        del kept[1]
    return kept


def _merged(starts: Sequence[_Start], tokens: int, limit: int) -> list[_Start]:
    """Return the starts that remain once neighbors are joined, from the first on, while they fit `limit` tokens."""
    kept: list[_Start] = []
    for start, end in zip(starts, [*starts[1:], _Start(0, tokens)], strict=True):
        if not kept or end.token - kept[-1].token > limit:
            kept.append(start)
    return kept
