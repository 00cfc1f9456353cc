"""The input of `ctx-compress index`, a folder of files or a JSONL file, read one text at a time with its metadata."""

import json
import logging
import os
import re
import tomllib
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Mapping
from errno import ENOENT
from pathlib import Path, PurePath
from stat import S_ISREG
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError

from ctx_compress_rag.errors import DataError, conversion_command
from ctx_compress_rag.indexing.documents import DOCUMENTS, UNSTRUCTURED, DocumentReader, readable_suffixes
from ctx_compress_rag.store.passage import Scalar, is_storable, passage_content_id
from ctx_compress_rag.strict import explain_validation_error

logger = logging.getLogger(__name__)

JSONL = (".jsonl", ".ndjson")


class IndexText(NamedTuple):
    """A text to index, its source (name of the file or row), whether it is Markdown, and its bytes in the input.

    `metadata` are a file's front matter, or the other fields of a row.
    """

    source: str
    text: str
    markdown: bool
    bytes: int
    metadata: Mapping[str, Scalar] = {}


class IndexInput(ABC):
    """Texts to index, read lazily. `bytes` is the size of all texts together."""

    kind = "rows"  # the name of the texts, in messages
    costly: Path | None = None  # as in `documents.DocumentReader`

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.bytes = size

    @abstractmethod
    def texts(self) -> Iterator[IndexText]:
        """Yield the texts in order, blank ones included."""

    def cannot_read(self, source: str) -> bool:
        """Whether a source exists, but could not be read when `texts` came to it."""
        return False

    def skipped(self) -> str:
        """Return lines that say what `texts` left out, "" if nothing."""
        return ""


class FolderInput(IndexInput):
    """The text files and documents of a folder and its subfolders, sorted, without hidden ones. Without any: DataError.

    Empty files, and files and folders that cannot be read, are skipped with a warning. Linked folders are read
    once, under their own names if they have one here.
    """

    kind = "files"

    def __init__(self, path: Path) -> None:
        suffixes = readable_suffixes()
        if not path.is_dir():
            fault = "is not a folder" if path.exists() else "does not exist"
            raise DataError(
                f"{str(path)!r} {fault}: give a folder of {', '.join(suffixes)} files, or a {', '.join(JSONL)} file"
            )
        super().__init__(path, 0)
        self.files: list[Path] = []
        self._other: Counter[str] = Counter()
        self._closed: list[str] = []
        self._unread: list[str] = []
        self._blank: list[str] = []
        self._lacking: dict[str, list[str]] = {}
        for file in self._walk(path):
            try:
                about = file.stat()
                regular, size = S_ISREG(about.st_mode), about.st_size
            except OSError:  # reading it will fail, and say so
                regular, size = True, 0
                if file.suffix.lower() not in suffixes and file.is_symlink():  # perhaps to a folder
                    self._cannot_list(FileNotFoundError(ENOENT, "the link leads nowhere", str(file)))
                    continue
            if regular and file.suffix.lower() in suffixes:
                self.files.append(file)
                self.bytes += size
            else:
                self._other[file.suffix.lower() or "without a suffix"] += 1
        self.files.sort()
        if not self.files:
            raise DataError(
                f"nothing to index in {str(path)!r}: it has no {', '.join(suffixes[:-1])} or {suffixes[-1]} files"
                f"{_hint(self._other)}"
            )

    def _walk(self, path: Path) -> Iterator[Path]:
        seen, waiting = set[str](), [path]
        for start in waiting:  # links come after all folders that are here themselves
            for folder, subfolders, names in os.walk(start, onerror=self._cannot_list):
                if (real := os.path.realpath(folder)) in seen:
                    subfolders.clear()
                    continue
                seen.add(real)
                subfolders[:] = [name for name in subfolders if not name.startswith(".")]
                waiting += sorted(each for name in subfolders if (each := Path(folder, name)).is_symlink())
                yield from (Path(folder, name) for name in names if not name.startswith("."))

    def _cannot_list(self, error: OSError) -> None:
        logger.warning("skipped %r: it cannot be read (%s)", error.filename, error.strerror)
        self._closed.append(path_text(Path(error.filename).relative_to(self.path).as_posix()) + "/")

    def texts(self) -> Iterator[IndexText]:
        self._unread, self._blank, self._lacking = [], [], {}
        with DocumentReader(self.costly) as reader:
            for file in self.files:
                source, suffix = path_text(file.relative_to(self.path).as_posix()), file.suffix.lower()
                try:
                    text, lacks = reader.read(file)
                    size = file.stat().st_size
                except (DataError, OSError) as error:
                    logger.warning("skipped %r: %s", str(file), error)
                    self._unread.append(source)
                    continue
                if not text.strip():
                    scan = ", perhaps a scan: recognize its text (OCR)" if suffix == ".pdf" else ""
                    logger.warning("skipped %r: it is empty%s", str(file), scan)
                    self._blank.append(source)
                for what in lacks:
                    self._lacking.setdefault(what, []).append(source)
                text, metadata = split_front_matter(text) if suffix == ".md" else (text, {})
                yield IndexText(source, text, suffix not in UNSTRUCTURED, size, metadata)

    def cannot_read(self, source: str) -> bool:
        return source in self._unread or source.startswith(tuple(self._closed))

    def skipped(self) -> str:
        counts = self._other + Counter(PurePath(name).suffix.lower() for name in self._unread + self._blank)
        counts += Counter(folders=len(self._closed))
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        lines = [f"skipped: {found}{_hint(self._other)}"] if found else []
        lines += [f"read without {what}: {_few(names)}" for what, names in self._lacking.items()]
        return "\n".join(lines)


class _Row(BaseModel, extra="allow"):
    text: str
    id: str | int | float | None = None


class JsonlInput(IndexInput):
    """A file of rows `{"text": ..., "id": ...}`; other fields are metadata. Without an id, a text's hash is the source.

    Raises DataError for other rows.
    """

    def texts(self) -> Iterator[IndexText]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.removeprefix(BOM_UTF8).strip():
                    try:
                        row = _Row.model_validate_json(line.decode("utf-8-sig"))
                    except UnicodeDecodeError as error:
                        raise DataError(
                            f"{self.path}, line {number}: not UTF-8 ({error}): convert it, for instance with "
                            f"{conversion_command(error)}"
                        ) from error
                    except ValidationError as error:
                        said = explain_validation_error(error).removeprefix("config: ")
                        raise DataError(
                            f'{self.path}, line {number}: {said}; give rows such as {{"text": ..., "id": ...}}'
                        ) from None
                    source = passage_content_id(row.text) if row.id is None else str(row.id)
                    yield IndexText(source, row.text, False, len(line), metadata_of(row.model_extra or {}))


def path_text(path: str) -> str:
    """Return a path as text that ids and Chroma take, with bytes that are not UTF-8 escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")


def open_index_input(path: str | Path) -> IndexInput:
    """Return the input in a folder, or .jsonl or .ndjson file. Raise DataError if there is none or it is unreadable."""
    if not str(path):
        raise DataError("the path to index is empty: give a folder or a file")  # Path("") is the current folder
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in JSONL or path.is_dir():
        return FolderInput(path)
    try:
        return JsonlInput(path, path.stat().st_size)
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from error


def _hint(others: Counter[str]) -> str:
    wanted = [suffix for suffix in DOCUMENTS if suffix in others]
    return f"; {', '.join(wanted)} can be read after pip install 'ctx-compress-rag[index]'" if wanted else ""


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_TAKEN = ("source", "root", "chroma:document")  # by the index and by Chroma
_MOST = 20_000  # characters of front matter, because parsing takes time
_FRONT_MATTER = re.compile(rf"(---|\+\+\+)[ \t]*\n(.{{0,{_MOST}}}?)^(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.M | re.S)
_LINE = re.compile(r"^([\w-]+)[ \t]*[:=][ \t]+(\S.*)$", re.M)
_FIRST_HEADING = re.compile(r"\s*#[ \t]+(.*?)[ \t#]*$", re.M)


def split_front_matter(text: str) -> tuple[str, dict[str, Scalar]]:
    """Return a Markdown text without its front matter (YAML or TOML), and the fields of that, as metadata.

    Its title and description become the text's first heading, which begins the first passage, whatever comes below.
    Anything but a mapping of names to values stays in the text.
    """
    if not (found := _FRONT_MATTER.match(text)):
        return text, {}
    try:
        fields = (tomllib.loads if found[1] == "+++" else _yaml)(found[2])
    except (ValueError, RecursionError, yaml.YAMLError):  # often a title with a colon
        fields = dict(_LINE.findall(found[2]))
    if not fields or not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        return text, {}
    text = text[found.end() :]
    heads = [" ".join(str(fields.pop(name, None) or "").split()) for name in ("title", "description")]
    if (first := _FIRST_HEADING.match(text)) and first[1] == heads[0]:
        heads[0] = ""
    heading = ": ".join(filter(None, heads))
    return (f"# {heading}\n\n{text}" if heading else text), metadata_of(fields)


def metadata_of(fields: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return fields as Chroma holds them: lists and mappings as JSON, `source` and `root` with `_` after the name."""
    return {
        _text(f"{name}_" if name in _TAKEN else name): value if is_storable(value) else _text(_json(value))
        for name, value in fields.items()
        if value is not None
    }


def _yaml(text: str) -> Any:
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise ValueError("aliases of aliases make values without end")
    return yaml.safe_load(text)


def _json(value: Any) -> str:
    if isinstance(value, list | dict):
        return json.dumps(value, default=str, skipkeys=True, ensure_ascii=False)
    return str(value)


def _text(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
