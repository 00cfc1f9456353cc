"""The text of files: plain text and Markdown as they are, other documents converted to Markdown by markitdown."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from ctx_compress_rag.errors import DataError, conversion
from ctx_compress_rag.extras import needs

TEXTS = (".txt", ".md")
DOCUMENTS = (".pdf", ".docx", ".html", ".htm")
_MOST_GROWN = 64 << 20
"""Bytes by which a Word file (a zip) may grow when unpacked; images hardly grow, and no book has so much text."""


def readable() -> tuple[str, ...]:
    """The suffixes of files that can be read: documents only with the `documents` extra."""
    return TEXTS + (DOCUMENTS if find_spec("markitdown") else ())


def read_file(path: Path) -> str:
    """A file's text.

    Raises:
        DataError: it cannot be read; the message says why.
    """
    try:
        if path.suffix.lower() in TEXTS:
            return path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".docx":
            _check_growth(path)
        return str(_converter().convert_local(path).markdown)
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(
            f"it is not UTF-8 (byte {error.start}); convert it, for instance with {conversion(error)}"
        ) from error
    except OSError as error:
        raise DataError(f"it cannot be read ({error.strerror})") from error
    except Exception as error:  # each parser has its own
        raise DataError(f"markitdown cannot read it as {path.suffix} ({type(error).__name__})") from error


def _check_growth(path: Path) -> None:
    with ZipFile(path) as packed:  # ZipFile reads no more of a part than its header says
        grown = sum(part.file_size - part.compress_size for part in packed.infolist())
    if grown > _MOST_GROWN:
        raise DataError(f"unpacking adds {grown:,} bytes, and {_MOST_GROWN:,} are allowed: split the file")


@cache
def _converter() -> Any:
    with needs("index"):
        from markitdown import MarkItDown
        from markitdown.converters import DocxConverter, HtmlConverter, PdfConverter
    converter = MarkItDown(enable_builtins=False)  # its converter of plain text would take a broken PDF for text
    for kind in (DocxConverter, HtmlConverter, PdfConverter):
        converter.register_converter(kind())
    return converter
