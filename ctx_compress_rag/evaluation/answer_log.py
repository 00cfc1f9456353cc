"""Keep a log of answers on disk, from which an interrupted evaluation resumes, and which people can read."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctx_compress_rag.evaluation.questions import Question


class AnswerLog:
    """A JSONL file with a line that says what answers depend on (`about`), then a line for each answer.

    A file of the same run is continued, any other file is replaced. If a line was deleted, or a second process wrote
    one, later answers of the system do not belong to its next question, so they are given again.
    """

    def __init__(self, file: str | Path, about: Mapping[str, Any], questions: Sequence[Question]) -> None:
        self._file = Path(file)
        self._given: dict[tuple[str, int | None], list[tuple[str, int]]] = defaultdict(list)
        head = json.dumps({"run": about}, ensure_ascii=False)
        lines: list[str] = []
        if self._file.is_file():
            with self._file.open(encoding="utf-8", errors="replace") as there:
                lines = there.readlines()
        kept = [f"{head}\n"]
        for line in lines[1:] if lines[:1] == kept else []:
            try:
                row = json.loads(line if line.endswith("\n") else "")
                given, answer = self._given[row["system"], row["ratio"]], (row["answer"], row["prompt_tokens"])
                fits = row["question"] == questions[len(given)].question
            except (ValueError, TypeError, LookupError):
                continue  # cut off when the run was interrupted, damaged, or of a question too many
            if fits:
                given.append(answer)
                kept.append(line)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("".join(kept), encoding="utf-8")

    def given(self, key: tuple[str, int | None]) -> list[tuple[str, int]]:
        """Return a system's answers at a ratio so far, in the questions' order, each with its prompt's token count."""
        return list(self._given[key])

    def add(self, key: tuple[str, int | None], asked: Sequence[Question], given: Sequence[tuple[str, int]]) -> None:
        """Append a system's answers to its next questions; `given` has the form that the method `given` returns."""
        rows = [
            {"system": key[0], "ratio": key[1], "question": q.question, "accepted": list(q.answers)}
            | {"answer": answer, "prompt_tokens": tokens}
            for q, (answer, tokens) in zip(asked, given, strict=True)
        ]
        with self._file.open("a", encoding="utf-8") as out:
            out.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
