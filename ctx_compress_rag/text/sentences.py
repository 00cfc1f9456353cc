"""Cut a passage: into sentences, groups or parts of them, which become one slot each, and into units.

A prompt shows some units of a passage: sentences of prose, lines of tables, lists and code.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
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


_BLOCK = re.compile(r"(?:[^\n]*\S[^\n]*(?:\n|\Z))+")  # lines without a blank one between them
_SEPARATOR = re.compile(r"[\t|&]|[;,](?=\S)")  # of a table's cells; in prose, a space follows a comma
_ITEM = re.compile(r"\s*(?:[-*+\u2022]|\d{1,3}[.)])\s")
_KEY = re.compile(r"[\w.-]+\s*[:=]")
_OPENS = re.compile(r"\s*(?:\[[^\]]*\]|[^|\t]*[:?])\s*")  # such as "[section]", "Opening hours:" and "Who pays?"
_SHORT = 120  # characters up to which a line is one unit
_RECORD = 240  # characters up to which a block of lines, one of several, is one unit
_WRAPPED = 34  # characters that lines have at least where an editor or a PDF wraps them


class PassageUnit(NamedTuple):
    """A unit, below the lines of its passage that say what it is about: a table's first row, a section, outer keys."""

    text: str
    heads: tuple[str, ...] = ()
    line: bool = False  # whether it begins a line

    @property
    def path(self) -> tuple[str, ...]:
        return (*self.heads, self.text)


def split_passage(text: str) -> list[PassageUnit]:
    """Return a text's units, in order, without blank ones. Raise MissingExtraError without the extra `sentences`."""
    found = (match[0].strip("\n").split("\n") for match in _BLOCK.finditer(text.replace("\r\n", "\n")))
    blocks = [(lines, _is_prose(lines)) for lines in found]
    records = sum(not prose for _, prose in blocks) > 2
    units: list[PassageUnit] = []
    for prose, group in groupby(blocks, lambda each: each[1]):
        parts = ["\n".join(block) for block, _ in group]
        if prose:
            units += map(PassageUnit, filter(None, map(str.strip, split_sentences("\n\n".join(parts)))))
        for part in [] if prose else parts:
            record = records and len(part) <= _RECORD
            units += [PassageUnit(part.strip(), line=True)] if record else _lines(part.split("\n"))
    return units


def _is_prose(lines: Sequence[str]) -> bool:
    """Whether lines are wrapped sentences: they are full, or end in the middle of a sentence."""
    if len(lines) == 1:
        return "|" not in lines[0]
    if sum(map(bool, map(_ITEM.match, lines))) > 1 or _rows(lines):
        return False
    pairs = list(pairwise(map(str.strip, lines)))
    full = 0.85 * max(map(len, lines))
    fills = [len(line) + 1 + len(after.split()[0]) > full for line, after in pairs]
    runs_on = [after[0].isalpha() and not after[0].isupper() and not _KEY.match(after) for _, after in pairs]
    ends_within = [
        len(line) > _WRAPPED and (line[-1].isalnum() or line[-1] == ",") and on
        for (line, _), on in zip(pairs, runs_on, strict=True)
    ]
    wrapped = full > _WRAPPED and sum(fills) >= 0.8 * len(pairs) and (len(pairs) < 2 or 4 * sum(runs_on) >= len(pairs))
    return wrapped or 2 * sum(ends_within) >= len(pairs)


def _rows(lines: Sequence[str]) -> list[int]:
    """Return which lines are rows of a table: they have as many separators as most that have any, half of all lines."""
    rows: list[int] = []
    for separator in "\t|&;,":
        counts = [sum(found[0] == separator for found in _SEPARATOR.finditer(line)) for line in lines]
        [(usual, number)] = Counter(filter(None, counts)).most_common(1) or [(0, 0)]
        if number > 1 and 4 * number >= 3 * sum(map(bool, counts)) and 2 * number >= len(lines) and number > len(rows):
            rows = [place for place, count in enumerate(counts) if count == usual]
    return rows


def _lines(lines: Sequence[str]) -> Iterator[PassageUnit]:
    """Yield the lines of a block that have words, each below the less indented ones that it belongs to."""
    rows = _rows(lines)
    first = rows[0] if rows and _names_columns(lines, rows) else None
    head: tuple[str, ...] = () if first is None else (lines[first].strip(),)
    above: list[tuple[float, str]] = []
    worded = [(place, line) for place, line in enumerate(lines) if re.search(r"\w", line)]
    for (place, line), (_, after) in zip(worded, [*worded[1:], (0, "")], strict=False):
        if place in rows:
            if place != first:
                yield PassageUnit(line.strip(), head, True)
            continue
        indent, deeper = float(_indent(line)), _indent(after) > _indent(line)
        opens = bool(after and len(line) <= _SHORT and _OPENS.fullmatch(line))
        level = indent - 0.5 if opens and not deeper else indent
        while above and above[-1][0] >= level:
            above.pop()
        heads = tuple(text for _, text in above)
        if opens or deeper:
            above.append((level, line.rstrip()))
        if not opens:
            parts = [line] if len(line) <= _SHORT else split_sentences(line)
            for number, part in enumerate(filter(str.strip, parts)):
                yield PassageUnit(part.strip() if number else part.rstrip(), heads, number == 0)


def _names_columns(lines: Sequence[str], rows: Sequence[int]) -> bool:
    """Whether a table's first row names its columns: a rule is below it, or it has no figures, as others have."""
    if not any(re.search(r"\w", lines[row]) for row in rows[1:]):
        return False
    below = lines[rows[0] + 1]
    return not re.search(r"\w", below) or not re.search(r"\d", lines[rows[0]])


def _indent(line: str) -> int:
    line = line.expandtabs(4)
    return len(line) - len(line.lstrip())
