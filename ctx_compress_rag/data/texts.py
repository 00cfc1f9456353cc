"""Plain text to train on: text files, and the contexts of question-answering files."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctx_compress_rag.data.examples import Example, Turn, read_jsonl
from ctx_compress_rag.errors import DataError

TEXT_SUFFIXES = (".txt", ".txt.xz")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")

_BLOCK_CHARACTERS = 20_000


def documents(path: str | Path) -> Iterator[str]:
    """The documents of a file, none of them blank.

    A .txt or .txt.xz file is one document, given in pieces of about 20,000 characters that end with a line. Each
    distinct context of a .jsonl or .jsonl.gz file of questions is a document.

    Raises:
        DataError: the file is missing, of another kind, or cannot be read.
    """
    path = Path(path)
    if path.name.endswith(JSONL_SUFFIXES):
        yield from dict.fromkeys(p for e in read_jsonl(path, unanswerable=True) for p in e.passages)
        return
    if not path.name.endswith(TEXT_SUFFIXES):
        known = ", ".join((*TEXT_SUFFIXES, *JSONL_SUFFIXES))
        raise DataError(f"{path} is not a text to train on: give a file that ends in one of {known}")
    opener: Any = lzma.open if path.suffix == ".xz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            while block := file.read(_BLOCK_CHARACTERS):
                block += file.readline()
                if block.strip():
                    yield block
    except FileNotFoundError:
        raise DataError(f"no data file at {path}") from None
    except (OSError, lzma.LZMAError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def text_examples(path: str | Path, words: int) -> list[Example]:
    """Rows of plain text, for stages that ask no questions: each of at least `words` words, except for a last one.

    Rows end with a line; a document's end is a row's end.
    """
    rows: list[list[str]] = [[]]  # the lines of each
    whole = Path(path).name.endswith(JSONL_SUFFIXES)
    for document in documents(path):
        for line in filter(None, map(str.strip, document.splitlines())):
            rows[-1].append(line)
            if sum(len(line.split()) for line in rows[-1]) >= words:
                rows.append([])
        if whole:
            rows.append([])
    examples = [Example(("\n".join(lines),), (Turn("", ("",)),)) for lines in rows if lines]
    if not examples:
        raise DataError(f"{path} holds no text")
    return examples
