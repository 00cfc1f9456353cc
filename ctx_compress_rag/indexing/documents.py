"""Read the text of files. Plain text and Markdown stay as they are; markitdown converts other documents to Markdown."""

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any, Self

from ctx_compress_rag.errors import DataError, conversion_command, needs

TEXTS = (".txt", ".md", ".rst", ".json")
UNSTRUCTURED = (".txt", ".json")  # texts in which `#` or a line below another makes no heading
DOCUMENTS = {
    ".pdf": "pdfminer",
    ".docx": "mammoth",
    ".html": "markitdown",
    ".htm": "markitdown",
    ".csv": "markitdown",
    ".tsv": "markitdown",
    ".pptx": "pptx",
    ".xlsx": "openpyxl",
}
"""The package that reads each kind of document. It comes with the extra `index`."""

MEMORY = 2 << 30  # bytes of address space for reading documents, of which Python and the parsers take a quarter
LEAST_SECONDS, SECONDS_PER_MB, MOST_SECONDS = 30, 60, 600
"""Limits of the time for a document, in seconds, two to three times what PDFs full of text took."""


def readable_suffixes() -> tuple[str, ...]:
    """Return the suffixes of files that can be read. Those of documents need the extra `index`."""
    return TEXTS + tuple(suffix for suffix, package in DOCUMENTS.items() if find_spec(package))


class DocumentReader:
    """Reads files one after another, documents in a separate process, which is killed at its limits of time and memory.

    `costly` is a file (None: none) with the hashes of documents that met a limit, so that no later run tries them.
    """

    def __init__(self, costly: Path | None) -> None:
        self._costly = costly
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def read(self, path: Path) -> tuple[str, list[str]]:
        """Return a file's text and what it lacks of the file ("comments"). Raise DataError if it cannot be read."""
        try:
            if path.suffix.lower() in TEXTS:
                return path.read_text(encoding="utf-8-sig"), []
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except UnicodeDecodeError as error:
            how = conversion_command(error)
            raise DataError(f"it is not UTF-8 (byte {error.start}): convert it, for instance with {how}") from error
        except OSError as error:
            raise DataError(f"it cannot be read ({error.strerror})") from error
        known = self._known()
        if digest in known:
            raise DataError(f"{known[digest]}, in an earlier run (remove {self._costly} to try it again)")
        answer = self._convert(path)
        if "costly" in answer:
            self.__exit__()
            if self._costly:
                self._costly.parent.mkdir(parents=True, exist_ok=True)
                self._costly.write_text(json.dumps(known | {digest: answer["error"]}, indent=1))
        if "error" in answer:
            raise DataError(answer["error"])
        return answer["text"], answer["lacks"]

    def _known(self) -> dict[str, str]:
        """Return which limit documents met, by their hash."""
        with suppress(OSError, ValueError, TypeError, RecursionError):
            if self._costly:
                return dict(json.loads(self._costly.read_text()))
        return {}

    def _convert(self, path: Path) -> dict[str, Any]:
        """Return the answer of the process (started if there is none), or, if it ends, that a limit was met."""
        process = self._process = self._process or _start()
        assert process.stdin and process.stdout
        limit = min(MOST_SECONDS, LEAST_SECONDS + SECONDS_PER_MB * path.stat().st_size // 1_000_000)
        timer = Timer(limit, process.kill)
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([str(path), limit]) + "\n")
            process.stdin.flush()
        timer.start()
        answer = process.stdout.readline()
        late = timer.finished.is_set()
        timer.cancel()
        if answer:
            return dict(json.loads(answer))
        said = f"takes more than {limit} seconds" if late else "crashes its parser, perhaps for lack of memory"
        return {"error": f"reading it {said}", "costly": True}


def _start() -> subprocess.Popen[str]:
    with needs("index"):
        import markitdown  # noqa: F401
    # Libraries that start a thread per core would take much of the address space.
    limits = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ctx_compress_rag.indexing.conversion", str(MEMORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | limits,
    )
    assert process.stdout
    process.stdout.readline()  # that it is ready
    return process
