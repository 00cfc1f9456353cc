"""Plain text to train on: text files, and the contexts of question-answering files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ctx_compress_rag.data.examples import Example, Turn, open_text, read_jsonl
from ctx_compress_rag.errors import DataError


def text_examples(path: str | Path, words: int) -> list[Example]:
    """Rows of plain text, for stages that ask no questions: each of at least `words` words, except for a last one.

    Rows end with a line; a document's end is a row's end. A .txt or .txt.xz file is one document; each distinct context
    of a .jsonl or .jsonl.gz file of questions is one.

    Raises:
        DataError: the file is missing, of another kind, empty, or cannot be read.
    """
    rows: list[list[str]] = []  # the lines of each
    for document in _documents(Path(path)):
        row: list[str] = []
        for line in filter(None, map(str.strip, document.splitlines())):
            if not row:
                rows.append(row)
            row.append(line)
            if sum(len(line.split()) for line in row) >= words:
                row = []
    if not rows:
        raise DataError(f"{path} holds no text: give one that does")
    return [Example(("\n".join(lines),), (Turn("", ("",)),)) for lines in rows]


def _documents(path: Path) -> Iterable[str]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return dict.fromkeys(p for e in read_jsonl(path, unanswerable=True) for p in e.passages)
    if not path.name.endswith((".txt", ".txt.xz")):
        raise DataError(f"{path} is not a text to train on: give a .txt, .txt.xz, .jsonl or .jsonl.gz file")
    with open_text(path) as file:
        return [file.read()]
