"""Cut text into passages of limited length, at paragraphs and sentences if possible."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import regex

_INSIDE = (
    r"(?![\p{GCB=Extend}\p{GCB=SpacingMark}\p{GCB=ZWJ}])"  # not before a mark that belongs to the character before
)
_LINES, _PARAGRAPHS = 0, 1
_BREAKS = [
    regex.compile(pattern, regex.M)
    for pattern in (
        r"\n",
        rf"\n[ \t]*\n\s*{_INSIDE}|(?=^\|.*\|[ \t]*\n\|[ \t]*:?-[-:| \t]*\|[ \t]*$)",  # also before a table
        # Sentences and lines. No space follows the full stop, exclamation and question mark of Chinese and Japanese.
        rf"(?<=[.!?])[\"')\]]*\s+{_INSIDE}|(?<=[\u3002\uff01\uff1f]){_INSIDE}|\n",
        rf"\s+{_INSIDE}",
        r"\X",  # a character with its marks
        r"[\s\S]",
    )
]
_TABLE_HEAD = regex.compile(r"\|.*\|[ \t]*\n\|[ \t]*:?-[-:| \t]*\|[ \t]*\n")
_TABLE_ROW = regex.compile(r"^\|.*\|[ \t]*$", regex.M)
_UNDERLINED = r"(?<=\A|\n[ \t]*\n)\S.*\n(?:={3,}|-{3,}|~{4,}|\^{3,})[ \t]*$"
_HEADINGS = regex.compile(
    r"^[ \t]*(?P<fence>`{3,}(?!.*`)|~{3,})[\s\S]*?(?:^[ \t]*(?P=fence)|\Z)"  # code, in which # begins no heading
    rf"|(?P<headings>(?:^(?:\#{{1,6}}[ \t]+\S.*|{_UNDERLINED})(?:\n\s*|\Z))+)",
    regex.M,
)
_OUTER_BLANKS = regex.compile(rf"\A\s+{_INSIDE}|\s+\Z")
_LONGEST_TOKEN = 100
"""Maximum characters of a token. A text with more of them than its tokens could hold is not tokenized to be counted."""
_SEAM = 2  # how many more tokens two texts may have when joined than separately


def chunk_text(text: str, tokenizer: Any, max_tokens: int, *, markdown: bool = False) -> Iterator[str]:
    """Yield the passages of a text, in order. Only white space between passages is dropped.

    Paragraphs are joined as long as they fit. A paragraph that is too long by itself is cut at sentences, a sentence at
    spaces, a word between characters. Each part of a long Markdown table begins with the table's first two rows.

    A passage has at most `max_tokens` tokens of the decoder (8 or more), special tokens not counted. With `markdown`, a
    passage begins at each heading, headings that follow each other stay together, and table cells lose their padding.
    """

    def count(part: str) -> int:
        if len(part) > max_tokens * _LONGEST_TOKEN:
            return max_tokens + 1
        return len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    found: list[tuple[int, int]] = []
    if markdown:
        text = _TABLE_ROW.sub(_tightened, text)
        found = [each.span() for each in _HEADINGS.finditer(text) if each["headings"] and each.end() < len(text)]
    for (start, end), (following, _) in pairwise([(0, 0), *found, (len(text), 0)]):
        section = _stripped(text[start:following])
        if count(section) > max_tokens:
            yield from _below(text[start:end], text[end:following], count, max_tokens, _PARAGRAPHS)
        elif section:
            yield section


def _cut(text: str, count: Callable[[str], int], most: int, level: int) -> Iterator[str]:
    """Yield parts of at most `most` tokens, cut at the breaks of a level, and longer ones at the next level's."""
    ends = [0, *(found.end() for found in _BREAKS[level].finditer(text)), len(text)]
    start, last = 0, len(ends) - 1
    while start < last:
        end = start + _fitting(text, ends, start, count, most)
        fits = end > start
        end = end if fits else start + 1
        part = _stripped(text[ends[start] : ends[end]])
        start = end
        if fits or level == len(_BREAKS) - 1:
            if part:
                yield part
        elif level == _PARAGRAPHS and (head := _TABLE_HEAD.match(part)):
            yield from _below(head[0], part[head.end() :], count, most, _LINES, repeat=True)
        else:
            yield from _cut(part, count, most, level + 1)


def _fitting(text: str, ends: list[int], start: int, count: Callable[[str], int], most: int) -> int:
    """Return how many pieces of the text, from piece `start` on, have at most `most` tokens together."""

    def too_long(number: int) -> bool:
        return count(_stripped(text[ends[start] : ends[start + number]])) > most

    rest, number = len(ends) - 1 - start, 1
    while number <= rest and not too_long(number):
        number *= 2
    least = number // 2
    return least + bisect_left(range(least + 1, min(number, rest + 1)), True, key=too_long)


def _below(
    head: str, text: str, count: Callable[[str], int], most: int, level: int, *, repeat: bool = False
) -> Iterator[str]:
    """Yield the parts of a text, the first (with `repeat`, each) below a head, unless that takes half of the tokens."""
    room = most - count(head) - _SEAM if head else most
    if room < most // 2:
        yield from _cut(head + text, count, most, _PARAGRAPHS + 1 if repeat else _PARAGRAPHS)
        return
    for number, part in enumerate(_cut(text, count, room, level)):
        yield head + part if repeat or number == 0 else part


def _stripped(text: str) -> str:
    return str(_OUTER_BLANKS.sub("", text))


def _tightened(row: Any) -> str:
    cells = " ".join(row[0].split())
    return cells if set(cells) - set("|:- ") else re.sub("-{4,}", "---", cells)
