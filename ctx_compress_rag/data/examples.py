"""Examples for training and evaluation, and the files that hold them: JSONL, or plain text to train on."""

import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from ctx_compress_rag.errors import DataError, conversion_command
from ctx_compress_rag.strict import explain_validation_error

T = TypeVar("T")

SUMMARY_REQUEST = "Summarize the documents."
"""The question of every example whose answer is a summary. An example may share it with held-out data."""


@dataclass(frozen=True)
class Turn:
    """A question and its accepted answers. Training uses the first; if there are none, the passages hold no answer.

    `subject` is the name that the question is about, and `evidence` holds verbatim parts of the passages that answer
    it. Both are empty if the data does not give them.
    """

    question: str
    answers: tuple[str, ...]
    subject: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """Passages, and the questions that are asked about them."""

    passages: tuple[str, ...]
    turns: tuple[Turn, ...]


def read_jsonl(path: str | Path, max_turns: int = 1, unanswerable: bool = False) -> list[Example]:
    """Read rows `{"question": str, "answers": [str, ...], "context": str or [str, ...]}` of a .jsonl or .jsonl.gz file.

    Instead of `context`, a row may have `passages`, a list of objects `{"title": str, "text": str}`, whose title
    becomes the first line of the passage. A row may also have `"evidence": [str, ...]`, verbatim parts of the passages
    that answer the question, from which stage ram learns (Read As Human, eq. 8).

    Consecutive rows with the same context become one example with up to `max_turns` questions. Other keys are ignored.
    `unanswerable` allows rows with `"answers": []`, whose passages do not answer the question, which else are errors.

    Raises DataError, which names file and line, if the file cannot be read or has no rows, or a row has another form.
    """
    examples: list[Example] = []
    with open_text_file(Path(path)) as lines:
        rows = [_row(line, f"{path}:{number}", unanswerable) for number, line in enumerate(lines, 1) if line.strip()]
    for passages, turn in rows:
        last = examples[-1] if examples else None
        if last and last.passages == passages and len(last.turns) < max_turns:
            examples[-1] = Example(passages, (*last.turns, turn))
        else:
            examples.append(Example(passages, (turn,)))
    if not examples:
        raise DataError(f"{path} contains no examples: give rows with question, answers and context")
    return examples


@contextmanager
def open_text_file(path: Path) -> Iterator[IO[str]]:
    """Open a UTF-8 file, plain or packed (.gz, .xz), for reading; raise a DataError if the file cannot be read."""
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except FileNotFoundError:
        raise DataError(f"no data file at {path}: correct the path") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"cannot read {path} ({error}): give a file in UTF-8, for instance with {conversion_command(error)}"
        ) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"cannot read {path} ({error}): give a file in UTF-8, packed or not") from error


class _Titled(BaseModel):
    title: str
    text: str


class _Row(BaseModel):
    question: str
    answers: list[str]
    context: str | list[str] = []
    passages: list[_Titled] = []
    subject: str = ""
    evidence: list[str] = []


def _row(line: str, place: str, unanswerable: bool) -> tuple[tuple[str, ...], Turn]:
    try:
        row = _Row.model_validate_json(line)
    except ValidationError as error:
        said = explain_validation_error(error).removeprefix("config: ")
        raise DataError(f"{place}: {said}; give question, answers and context, as an object in one line") from None
    context = [row.context] if isinstance(row.context, str) else row.context
    passages = tuple(f"{each.title}\n{each.text}" for each in row.passages) or tuple(context)
    if not passages or not all(map(str.strip, passages)):
        raise DataError(f"{place}: context or passages are empty, or one of them: give one or more, none blank")
    if not (row.answers or unanswerable):
        raise DataError(f"{place}: answers is empty: give one or more")
    for part in row.evidence:
        if not part.strip() or not any(part in passage for passage in passages):
            raise DataError(f"{place}: no passage contains the evidence {part[:80]!r}: copy it exactly from a passage")
    return passages, Turn(row.question, tuple(row.answers), row.subject, tuple(row.evidence))


def text_examples(path: str | Path, words: int) -> list[Example]:
    """Read plain text as examples without questions. Each has at least `words` words, except the last of a document.

    An example consists of whole lines of one document. A .txt or .txt.xz file is one document. In a .jsonl or .jsonl.gz
    file of questions, each distinct passage is one. Raises DataError if it is another kind, damaged or blank.
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
        return distinct_passages(read_jsonl(path, unanswerable=True))
    if not path.name.endswith((".txt", ".txt.xz")):
        raise DataError(f"{path} is not a text to train on: give a .txt, .txt.xz, .jsonl or .jsonl.gz file")
    with open_text_file(path) as file:
        return [file.read()]


def distinct_passages(examples: Iterable[Example]) -> list[str]:
    """Return the examples' passages in order, each once."""
    return list(dict.fromkeys(passage for example in examples for passage in example.passages))


def without_long_passages(examples: Sequence[Example], most_words: int | None) -> list[Example]:
    """Return the examples whose passages all have at most `most_words` words; None sets no limit."""
    return [e for e in examples if most_words is None or all(len(p.split()) <= most_words for p in e.passages)]


def spread_examples(items: Sequence[T], limit: int) -> list[T]:
    """Return at most `limit` items (all if fewer), evenly spread, because a file's neighbors often share an article."""
    return [items[i * len(items) // limit] for i in range(limit)] if len(items) > limit else list(items)


def write_jsonl(path: str | Path, examples: Iterable[Example]) -> int:
    """Write examples over a .jsonl file as rows that `read_jsonl` reads, one a question; return the number of rows."""
    rows = 0
    with open(path, "w", encoding="utf-8") as out:
        for example in examples:
            for turn in example.turns:
                row = {"question": turn.question, "answers": turn.answers, "context": example.passages}
                row |= {"evidence": turn.evidence} if turn.evidence else {}
                row |= {"subject": turn.subject} if turn.subject else {}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                rows += 1
    return rows
