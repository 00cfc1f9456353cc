"""A process that converts documents to Markdown, so that limits of time and memory apply to this process alone.

The argument is the limit of its address space in bytes. The process writes "ready", then reads paths, each with a limit
in seconds, and answers each with `text` and `lacks`, or with `error`. Everything is JSON, one value in a line.
"""

import csv
import io
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import copy
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile

MOST_TEXT = 32 << 20  # maximum characters of a document's text
_UNREAD_PARTS = {
    "page headers and footers": re.compile(r"word/(header|footer)\d*\.xml"),
    "comments": re.compile(r"word/comments\.xml"),
}
_UNEQUAL = "a separator that all lines have equally often"
_SEPARATORS = "\t;|,"  # of two that would do, the first: a comma also stands in numbers and sentences
_NAMED = re.compile(r'"?sep=(.)"?\r?\n')  # the first line that Excel writes, or asks for
# Elements of Word whose text mammoth drops: what was moved, fields, words with ruby, words from right to left.
_DROPPED = re.compile(rb"(</?w:)(?:moveTo|fldSimple|customXml|ruby|rubyBase|dir|bdo)(?=[\s>])")
_POWER = re.compile(r"\s*[-+\u2212]?\d")
_NO_VALUE = re.compile(rb'<c (?![^>]*t="str")[^>]*><f[^>]*(?:/>|>[^<]*</f>)(?:<v></v>|<v */>)?</c>')  # of a formula
_GLYPH = re.compile(r"\(cid:\d+\)")
_MOST_GLYPHS = 0.1  # share of glyphs without a character above which a PDF's text counts as unreadable


def read_document(path: Path) -> dict[str, Any]:
    """Return a document's `text` and a list of what it `lacks`, or an `error` (`costly`: for want of memory)."""
    from markitdown import StreamInfo, converters

    suffix = path.suffix.lower()
    kind = {".htm": "Html", ".tsv": "Csv"}.get(suffix, suffix[1:].capitalize())
    lacks = []
    try:
        with path.open("rb") as opened:
            file: Any = opened
            if kind == "Csv":
                table, sure = _separated_by_commas(_decoded(file.read()))
                file, lacks = io.BytesIO(table.encode()), [] if sure else [_UNEQUAL]
            elif suffix in (".docx", ".pptx", ".xlsx") and file.peek(4)[:4] == b"\xd0\xcf\x11\xe0":
                return {"error": "it is protected by a password (or of an older format): save it without"}
            if kind == "Xlsx":
                text = "\n\n".join(_sheets(file))
                lacks = ["values of formulas, which no program has computed"] * _without_values(file)
            elif kind in ("Docx", "Html"):
                text = _markdown(_word_html(file) if kind == "Docx" else file.read())
            else:
                about = StreamInfo(extension=suffix, charset="utf-8" if kind == "Csv" else None)
                # A slide's text has a vertical tab where a line is broken.
                text = getattr(converters, f"{kind}Converter")().convert(file, about).markdown.replace("\v", " ")
                if kind == "Pdf":
                    try:
                        text = "\n".join([text, *_filled_in(file)])
                    except Exception:  # the form is damaged: the page's text is not
                        lacks = ["what was filled in its form"]
    except OSError as error:
        return {"error": f"it cannot be read ({error.strerror})"}
    except MemoryError:
        return {"error": "reading it takes too much memory", "costly": True}
    except Exception as error:  # each parser has its own
        if "Password" in type(error).__name__:
            return {"error": "it is protected by a password: save it without"}
        return {"error": f"markitdown cannot read it as {suffix} ({type(error).__name__})"}
    if len(text) > MOST_TEXT:
        return {"error": f"its text has {len(text):,} characters, and {MOST_TEXT:,} are allowed: split it"}
    text, glyphs = _GLYPH.subn("", text)
    if glyphs > _MOST_GLYPHS * len("".join(text.split())):
        return {
            "error": f"its fonts do not say which characters {glyphs:,} of its glyphs are: recognize its text (OCR)"
        }
    lacks += ["characters of glyphs without one"] * bool(glyphs)
    return {"text": text, "lacks": lacks + (_unread_parts(path, text) if suffix == ".docx" else [])}


def _decoded(data: bytes) -> str:
    from charset_normalizer import from_bytes  # which comes with markitdown

    return str(from_bytes(data).best() or data.decode(errors="ignore")).lstrip("\ufeff")


def _separated_by_commas(text: str) -> tuple[str, bool]:
    """Return a table with commas between its cells, and whether its separator is sure.

    It is the one that its first line names (`sep=;`), or that all lines have equally often, not counting quoted cells
    and blank lines; a table of one column has none. Otherwise it is the one that most lines have equally often.
    """
    # A quote that nothing closes is not an error. The limit is the process's: others read longer cells.
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
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


def _word_html(file: BinaryIO) -> bytes:
    from mammoth import convert_to_html
    from markitdown.converter_utils.docx.pre_process import pre_process_docx

    readable = io.BytesIO()
    with ZipFile(file) as packed, ZipFile(readable, "w") as written:
        for name in packed.namelist():
            written.writestr(name, _DROPPED.sub(rb"\1smartTag", packed.read(name)))
    return bytes(convert_to_html(pre_process_docx(readable), style_map="u => u").value.encode())


def _markdown(html: bytes) -> str:
    """Return HTML as Markdown, with the first row of each table as its head and "^" before powers."""
    from bs4 import BeautifulSoup, UnicodeDammit
    from markitdown.converters import HtmlConverter

    # markitdown's own parser would put each cell, row or item that is not closed, as HTML allows, into the one before.
    soup = BeautifulSoup(UnicodeDammit(html, ["utf-8"], is_html=True).unicode_markup or "", "lxml")
    for power in soup("sup"):
        if _POWER.match(power.get_text()):
            power.insert(0, "^")
    for table in soup("table"):
        for about in table(["caption", "colgroup"], recursive=False):  # before a first row, they would cost the head
            table.insert_before(about)
        _repeat_spanning_cells(table)
    converted = HtmlConverter().convert_string(
        str(soup), escape_asterisks=False, escape_underscores=False, table_infer_header=True
    )
    return converted.markdown


def _repeat_spanning_cells(table: Any) -> None:
    """Put a copy of each cell that spans rows into all of them: in Markdown, the cells after it would move left."""
    spanning: dict[int, tuple[Any, int]] = {}  # by its column, a cell that goes on, and in how many rows
    for row in table("tr"):
        cells, column = row(["td", "th"], recursive=False), 0
        while row.find_parent("table") is table and (cells or column in spanning):
            if column in spanning:
                cell, rows = spanning.pop(column)
                row.insert(row.index(cells[0]) if cells else len(row.contents), cell := copy(cell))
            else:
                cell = cells.pop(0)
                rows = _span(cell, "rowspan")
            if rows > 1:
                spanning[column] = cell, rows - 1
            column += _span(cell, "colspan")


def _span(cell: Any, way: str) -> int:
    return int(number[0]) if (number := re.match(r"\d{1,4}", cell.get(way, ""))) else 1


def _sheets(file: BinaryIO) -> Iterator[str]:
    """Yield each sheet of a workbook as Markdown, without empty rows and columns.

    markitdown's own has NaN for empty cells and for texts such as NA, `Unnamed: 1` for headings, and 89.0 for 89.
    """
    from markitdown import StreamInfo, converters
    from openpyxl import load_workbook

    csv_converter: Any = converters.CsvConverter
    about = StreamInfo(extension=".csv", charset="utf-8")
    for sheet in load_workbook(file, read_only=True, data_only=True).worksheets:
        sheet.reset_dimensions()  # what a file says of them may be wrong
        found = ([_cell(value) for value in row] for row in sheet.iter_rows(values_only=True))
        rows = [row for row in found if any(row)]
        used = sorted({column for row in rows for column, cell in enumerate(row) if cell})
        cells = ([row[column] if column < len(row) else "" for column in used] for row in rows)
        table = io.BytesIO(_written(cells).encode())
        yield f"## {sheet.title}\n{csv_converter().convert(table, about).markdown}".strip()


def _cell(value: object) -> str:
    """Return a cell's value without the time of a mere date, and without the breaks that openpyxl leaves escaped."""
    return "" if value is None else re.sub("_x000[BD]_", " ", str(value).removesuffix(" 00:00:00"))


def _filled_in(file: BinaryIO) -> Iterator[str]:
    """Yield what was typed or chosen in each field of a PDF's form, after its label; the page's text lacks both."""
    from pdfminer.pdfdocument import PDFDocument
    from pdfminer.pdfparser import PDFParser
    from pdfminer.pdftypes import resolve1
    from pdfminer.psparser import literal_name
    from pdfminer.utils import decode_text

    def filled_in(fields: Any, label: str = "") -> Iterator[str]:
        for field in map(resolve1, resolve1(fields) or ()):
            own = resolve1(field.get("TU") or field.get("T"))
            own = label if own is None else decode_text(own)
            chosen = resolve1(field.get("V"))
            values = [resolve1(each) for each in (chosen if isinstance(chosen, list) else [chosen])]
            said = [decode_text(each) if isinstance(each, bytes) else literal_name(each) for each in values if each]
            if any(each not in ("", "Off") for each in said):
                yield f"{own}: {', '.join(said)}"
            yield from filled_in(field.get("Kids"), own)

    form = resolve1(PDFDocument(PDFParser(file)).catalog.get("AcroForm")) or {}
    return filled_in(form.get("Fields"))


def _without_values(file: BinaryIO) -> bool:
    with ZipFile(file) as packed:
        sheets = (packed.read(name) for name in packed.namelist() if name.startswith("xl/worksheets/"))
        return any(map(_NO_VALUE.search, sheets))


def _rows(text: str, separator: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row]


def _written(rows: Iterable[list[str]]) -> str:
    written = io.StringIO(newline="")
    csv.writer(written).writerows(rows)
    return written.getvalue()


def _unread_parts(path: Path, text: str) -> list[str]:
    """Return the kinds of content of a Word file that its text lacks."""
    with ZipFile(path) as packed:
        with_text = [name for name in packed.namelist() if name.endswith(".xml") and b"<w:t" in packed.read(name)]
        body = packed.read("word/document.xml").decode(errors="replace")
    found = [kind for kind, part in _UNREAD_PARTS.items() if any(map(part.fullmatch, with_text))]
    boxes = " ".join(re.findall("<w:txbxContent>(.*?)</w:txbxContent>", body, re.S))
    words = set(re.findall(r"[^\W_]+", " ".join(re.findall("<w:t(?: [^>]*)?>([^<]*)", boxes))))
    return found + ["text boxes"] * (not words <= set(re.findall(r"[^\W_]+", text)))


def main() -> None:
    import markitdown.converters  # noqa: F401  # so that it does not count as reading

    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="ascii")  # each line goes out at once
    os.dup2(2, 1)  # what parsers print must not mix with answers
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    answers.write(f"{json.dumps('ready')}\n")
    for line in sys.stdin:
        path, seconds = json.loads(line)
        if sys.platform != "win32":
            signal.alarm(seconds + 5)  # should the parent be gone
        answers.write(f"{json.dumps(read_document(Path(path)))}\n")


if __name__ == "__main__":
    main()
