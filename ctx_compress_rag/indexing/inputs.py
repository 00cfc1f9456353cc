"""What `ctx-compress index` reads: a folder of files, or JSONL; one text at a time."""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from stat import S_ISREG
from typing import Any, NamedTuple

from ctx_compress_rag.errors import DataError, conversion
from ctx_compress_rag.indexing.documents import DOCUMENTS, TEXTS, read_file, readable
from ctx_compress_rag.store.passage import content_id

logger = logging.getLogger(__name__)

JSONL = (".jsonl", ".ndjson")


class Text(NamedTuple):
    """One text: the name that readers look it up by, whether it is Markdown, and its share of the input's bytes."""

    source: str
    text: str
    markdown: bool
    bytes: int


class Input(ABC):
    """Texts to index, read lazily.

    Attributes:
        path: the folder or file.
        bytes: size of the whole input.
        kind: what the texts are called.
    """

    kind = "rows"

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.bytes = size

    @abstractmethod
    def texts(self) -> Iterator[Text]:
        """The texts in order, blank ones included."""

    def cannot_read(self, source: str) -> bool:
        """Whether a source exists, but could not be read when `texts` reached it."""
        return False

    def skipped(self) -> str:
        """What `texts` left out; "" if nothing."""
        return ""


class FolderInput(Input):
    """The text files and documents of a folder and its subfolders, sorted by name, without hidden ones.

    Files that are empty, and files and folders that cannot be read, are skipped with a warning; files of other types
    and links to folders are counted.

    Raises:
        DataError: there is no such folder, or no text in it that can be read.
    """

    kind = "files"

    def __init__(self, path: Path) -> None:
        suffixes = readable()
        if not path.is_dir():
            raise DataError(
                f"{str(path)!r} is not a folder: give the folder of your {', '.join(suffixes)} files, or a "
                f"{', '.join(JSONL)} file"
            )
        super().__init__(path, 0)
        self.files: list[Path] = []
        self._other: Counter[str] = Counter()
        self._closed: list[str] = []
        self._unread: list[str] = []
        self._empty = 0
        for folder, subfolders, names in os.walk(path, onerror=self._cannot_list):
            here = Path(folder)
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            self._other["links to folders"] += sum((here / name).is_symlink() for name in subfolders)
            self.bytes += sum(self._found(here / name, suffixes) for name in sorted(names) if name[0] != ".")
        self.files.sort()
        self._other = +self._other
        if not any(map(_has_text, self.files)):
            none = f"it has no {', '.join(suffixes[:-1])} or {suffixes[-1]} files{_hint(self._other)}"
            reason = f"none of its {len(self.files)} files can be read or has text" if self.files else none
            raise DataError(f"nothing to index in {str(path)!r}: {reason}")

    def _cannot_list(self, error: OSError) -> None:
        logger.warning("skipped %r: it cannot be read (%s)", error.filename, error.strerror)
        self._closed.append(as_text(Path(error.filename).relative_to(self.path).as_posix()) + "/")

    def _found(self, file: Path, suffixes: Sequence[str]) -> int:
        """Take in or count a file; its size if it is to be read."""
        try:
            about = file.stat()
            regular, size = S_ISREG(about.st_mode), about.st_size
        except OSError as error:
            # A folder may be listed and yet deny its files: reading them will fail, and say so.
            regular, size = isinstance(error, PermissionError), 0
        if not regular:
            self._other["broken links and devices"] += 1
        elif file.suffix.lower() in suffixes:
            self.files.append(file)
            return size
        else:
            self._other[file.suffix.lower() or "without a suffix"] += 1
        return 0

    def texts(self) -> Iterator[Text]:
        self._unread, self._empty = [], 0
        for file in self.files:
            source = as_text(file.relative_to(self.path).as_posix())
            try:
                text = read_file(file)
                size = file.stat().st_size
            except (DataError, OSError) as error:
                logger.warning("skipped %r: %s", str(file), error)
                self._unread.append(source)
                continue
            if not text.strip():
                logger.warning("skipped %r: it is empty", str(file))
                self._empty += 1
            yield Text(source, text, not source.lower().endswith(TEXTS[0]), size)

    def cannot_read(self, source: str) -> bool:
        return source in self._unread or source.startswith(tuple(self._closed))

    def skipped(self) -> str:
        unread = Counter(PurePath(name).suffix.lower() for name in self._unread)
        if self._closed:
            unread["folders"] = len(self._closed)
        if not (self._empty or unread or self._other):
            return ""
        parts = [f"{self._empty} empty", f"{unread.total()} unreadable{_by_type(unread)}"]
        parts += [f"{self._other.total()} of other types{_by_type(self._other)}"] if self._other else []
        return f"skipped files: {', '.join(parts)}{_hint(self._other)}"


class Jsonl(Input):
    """One text per line: `{"text": ..., "id": ...}`; without an id, its source is a hash of the text."""

    def texts(self) -> Iterator[Text]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except UnicodeDecodeError as error:
                        raise DataError(
                            f"{self.path}, line {number}: not UTF-8 ({error}): convert it, for instance with "
                            f"{conversion(error)}"
                        ) from error
                    except (ValueError, RecursionError) as error:
                        raise DataError(f"{self.path}, line {number}: not JSON ({error}): correct it") from error
                    yield _of_row(row, f"{self.path}, line {number}", len(line))


def as_text(path: str) -> str:
    """A path as text that ids and Chroma take: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")


def open_input(path: str | Path) -> Input:
    """The texts of a folder, or of a JSONL file.

    Raises:
        DataError: there is no such folder or file, or no text in the folder that can be read.
    """
    if not str(path):
        raise DataError("the path to index is empty: give a folder or a file")  # Path("") is the current folder
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in JSONL or path.is_dir():
        return FolderInput(path)
    try:
        return Jsonl(path, path.stat().st_size)
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from error


def _of_row(row: Any, where: str, size: int) -> Text:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: there is no "text" of type str in it: give rows such as {{"text": ..., "id": ...}}')
    id = row.get("id")
    for name, value in (("text", text), ("id", "" if id is None else str(id))):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: the {name} is not valid Unicode ({error.reason}): decode it again") from error
    return Text(content_id(text) if id is None else str(id), text, False, size)


def _has_text(file: Path) -> bool:
    try:
        return bool(read_file(file).strip())
    except DataError:
        return False


def _by_type(counts: Counter[str]) -> str:
    return f" ({', '.join(f'{count} {suffix}' for suffix, count in counts.most_common())})" if counts else ""


def _hint(others: Counter[str]) -> str:
    wanted = [suffix for suffix in DOCUMENTS if suffix in others]
    return f"; {', '.join(wanted)} can be read after pip install 'ctx-compress-rag[index]'" if wanted else ""
