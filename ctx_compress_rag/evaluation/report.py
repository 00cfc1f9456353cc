"""Format results as Markdown tables and scores with their errors, and write the files of a report."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctx_compress_rag.evaluation.statistics import ConfidenceInterval, standard_error


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows, each a mapping of columns to cells, as a Markdown table; a cell that a row lacks is empty."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    head, *body = [
        f"| {' | '.join(cells)} |" for cells in (columns, *([row.get(c, "") for c in columns] for row in rows))
    ]
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def mean_with_error(mean: float, error: float | None) -> str:
    """Return a mean as text, with its standard error if there is one."""
    return f"{mean:.3f}" if error is None else f"{mean:.3f} ± {error:.3f}"


def mean_text(values: Sequence[float]) -> str:
    """Return the mean of the questions' scores as text, with its standard error unless there is only one score."""
    return mean_with_error(float(np.mean(values)), standard_error(values) if len(values) > 1 else None)


def interval_text(found: ConfidenceInterval | None, sign: str = "") -> str:
    """Return a value and its interval as text; `sign` "+" signs positive numbers, for differences. None gives ""."""
    return "" if found is None else f"{found.value:{sign}.3f} ({found.low:{sign}.3f} to {found.high:{sign}.3f})"


def ratio_text(ratio: float | None) -> str:
    """Return a ratio as text, such as "4x". None gives ""."""
    return "" if ratio is None else f"{ratio:g}x"


def write_report(folder: str | Path, name: str, text: str, record: Any = None) -> Path:
    """Write `name`.md, and `name`.json if there is a record; return the folder, which is made if needed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")
    if record is not None:
        written = json.dumps(record, indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(f"{written}\n", encoding="utf-8")
    return folder
