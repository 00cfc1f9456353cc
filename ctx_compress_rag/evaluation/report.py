"""Say how certain scores are, and write reports: Markdown tables, scores with their errors, files and plots.

The bootstrap draws questions and keeps all scores of a question together, so questions that are hard for every system
do not widen an interval. The draws are the same at every call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctx_compress_rag.errors import DataError, needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TAIL = 0.025
_RESAMPLES = 2000
_SEED = 0


def standard_error(scores: Sequence[float]) -> float:
    """Return the standard error of the mean of scores, one per question; raise DataError for fewer than two."""
    if len(scores) < 2:
        raise DataError(f"a standard error needs two scores or more, got {len(scores)}")
    return float(np.std(scores, ddof=1) / np.sqrt(len(scores)))


@dataclass(frozen=True)
class ConfidenceInterval:
    """A score with the bounds of its confidence interval."""

    value: float
    low: float
    high: float


def teacher_normalized(
    compressed: Sequence[float], no_context: Sequence[float], full_text: Sequence[float]
) -> ConfidenceInterval | None:
    """Return the share of the gain from full text that compression keeps (Simple Context Compression, section 5.1).

    The share is (compressed - no context) / (full text - no context), where each is the mean of any score over the same
    questions in the same order, answered by the same decoder. None if the full text is not significantly better than no
    context (at the interval's confidence level), because there is then no gain to take a share of.
    """
    scores, rng = np.array([compressed, no_context, full_text]), np.random.default_rng(_SEED)
    draws = (rng.integers(len(full_text), size=len(full_text)) for _ in range(_RESAMPLES))
    whole, means = scores.mean(axis=1), np.stack([scores[:, draw].mean(axis=1) for draw in draws])
    gain, worth = means[:, 0] - means[:, 1], means[:, 2] - means[:, 1]
    if whole[2] <= whole[1] or np.mean(worth <= 0) > _TAIL:
        return None
    share = (whole[0] - whole[1]) / (whole[2] - whole[1])
    low, high = np.quantile(gain[worth > 0] / worth[worth > 0], [_TAIL, 1 - _TAIL])
    return ConfidenceInterval(float(share), float(low), float(high))


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


_COLORS = ("#1f5fa8", "#d9722e", "#5a9e4b", "#8a5fb0", "#a8483f")
_MARKERS = "osD^v"
XLABEL = "source tokens per slot (compression ratio)"


@dataclass(frozen=True)
class ScoreCurve:
    """A system's scores as points (ratio, score from 0 to 1, margin of error on either side)."""

    label: str
    points: Sequence[tuple[float, float, float]]


def plot_scores(path: str | Path, curves: Sequence[ScoreCurve], levels: Mapping[str, float], title: str = "") -> Path:
    """Save a plot of answer F1 against the compression ratio as a PNG; return its path.

    The first of `curves` is what the plot is about, in a thicker line; styles repeat after five. `levels` are scores
    that have no ratio (full text, no context), drawn as horizontal lines.
    """
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    draw_curves(axes, curves, levels, sorted({ratio for curve in curves for ratio, _, _ in curve.points}))
    axes.set_xlabel(XLABEL)
    axes.set_ylabel("answer F1")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save_figure(figure, path)


def draw_curves(axes: Any, curves: Sequence[ScoreCurve], levels: Mapping[str, float], ticks: Sequence[float]) -> None:
    """Draw curves of scores from 0 to 1 with error bars, and levels as horizontal lines, over a logarithmic axis."""
    for i, curve in enumerate(curves):
        ratios, scores, margins = np.transpose(curve.points)
        axes.errorbar(
            ratios,
            scores,
            yerr=[np.minimum(margins, scores), np.minimum(margins, 1 - scores)],
            label=curve.label,
            color=_COLORS[i % len(_COLORS)],
            marker=_MARKERS[i % len(_MARKERS)],
            linestyle="-" if i == 0 else "--",
            linewidth=2.2 if i == 0 else 1.5,
            markersize=6 if i == 0 else 5,
            capsize=3,
        )
    for i, (label, level) in enumerate(levels.items()):
        axes.axhline(level, color="#555555", linestyle=(":", "-.")[i % 2], linewidth=1.3, label=label)
    axes.set_ylim(0, 1.05)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{ratio:g}x" for ratio in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; `width` and `height` are in inches. Needs the extra `train`."""
    with needs("train"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    # Without pyplot, whose backend belongs to the calling notebook or program.
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure as a PNG, and the folders above it; return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path
