"""Read a file of separated values whatever its separator is, as a CSV text with commas."""

import csv
import io
import re
from collections import Counter

_SEPARATORS = "\t;|,"  # of two that would do, the first: a comma also stands in numbers and sentences
_NAMED = re.compile(r'"?sep=(.)"?\r?\n')  # the first line that Excel writes, or asks for


def separated_by_commas(text: str) -> tuple[str, bool]:
    """Return a table with commas between its cells, and whether its separator is sure.

    It is the one that its first line names (`sep=;`), or that all lines have equally often, not counting quoted cells
    and blank lines; a table of one column has none. Otherwise it is the one that most lines have equally often.
    """
    csv.field_size_limit(len(text) + 1)  # a quote that nothing closes is no error
    named = _NAMED.match(text)
    text = text[named.end() :] if named else text
    tables = {separator: _rows(text, separator) for separator in (named[1] if named else _SEPARATORS)}
    widths = {separator: Counter(map(len, rows)) for separator, rows in tables.items()}
    sure = {separator: max(found) for separator, found in widths.items() if len(found) == 1 and max(found) > 1}
    if sure or named or all(set(found) <= {1} for found in widths.values()):
        separator = max(sure or widths, key=lambda each: sure.get(each, 0))
        return _written(tables[separator]), True
    agree = {each: max([0, *(n for width, n in found.items() if width > 1)]) for each, found in widths.items()}
    return _written(tables[max(agree, key=lambda each: agree[each])]), False


def _rows(text: str, separator: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row]


def _written(rows: list[list[str]]) -> str:
    written = io.StringIO(newline="")
    csv.writer(written).writerows(rows)
    return written.getvalue()
