"""Cut a passage into units, of which a prompt shows some: sentences of prose, lines of tables, lists and code."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from ctx_compress_rag.text.sentences import split_sentences

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
