"""Plot scores against the compression ratio, without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctx_compress_rag.errors import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            zorder=3 - i / 10,
        )
    for i, (label, level) in enumerate(levels.items()):
        axes.axhline(level, color="#555555", linestyle=(":", "-.")[i % 2], linewidth=1.3, label=label, zorder=1)
    axes.set_ylim(0, 1.05)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{ratio:g}x" for ratio in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


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
