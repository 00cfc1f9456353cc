"""Plots of score against compression ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation.figures import new_figure, save

_COLORS = ("#1f5fa8", "#d9722e", "#5a9e4b", "#8a5fb0", "#a8483f")
_MARKERS = "osD^v"
MOST_CURVES = len(_COLORS)
_XLABEL = "source tokens per slot (compression ratio)"


@dataclass(frozen=True)
class Curve:
    """A system's score at each ratio, with the bounds of its error bars."""

    label: str
    ratios: Sequence[float]
    scores: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def plot_scores(
    path: str | Path,
    curves: Sequence[Curve],
    levels: Mapping[str, float],
    *,
    ylabel: str = "answer F1",
    title: str | None = None,
) -> Path:
    """Save score against compression ratio as a PNG.

    Args:
        path: the file; its folder is made.
        curves: the systems, at most five; first the one that the plot is about.
        levels: scores that have no ratio (full text, no context), drawn as horizontal lines.
        ylabel: name of the score.
        title: a line above the plot.

    Returns:
        The file.

    Raises:
        ConfigError: there is no curve, or more than can be told apart.
        MissingExtraError: matplotlib is not installed.
    """
    _check(curves)
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    _draw(axes, curves, levels, sorted({ratio for curve in curves for ratio in curve.ratios}))
    axes.set_ylim(0, _top(curves, levels))
    axes.set_xlabel(_XLABEL)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save(figure, path)


def plot_panels(
    path: str | Path,
    panels: Mapping[str, Sequence[Curve]],
    shared: Sequence[Curve],
    levels: Mapping[str, float],
    ticks: Sequence[float],
    *,
    ylabel: str = "answer F1",
    title: str | None = None,
) -> Path:
    """Save several plots of score against compression ratio side by side, on the same axes, as one PNG.

    Args:
        path: the file; its folder is made.
        panels: the curves of each plot by its heading, at most five each.
        shared: curves that every plot shows in grey, for comparison.
        levels: scores that have no ratio, drawn as horizontal lines in every plot.
        ticks: the ratios named on the axis.
        ylabel: name of the score.
        title: a line above the plots.

    Returns:
        The file.

    Raises:
        ConfigError: there is no plot, or one has no curve or more than can be told apart.
        MissingExtraError: matplotlib is not installed.
    """
    if not panels:
        raise ConfigError("there is nothing to plot: no panels")
    for curves in panels.values():
        _check(curves)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.4 * columns, 3.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    drawn = [curve for curves in panels.values() for curve in curves] + list(shared)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (heading, curves) in zip(grid.flat, panels.items(), strict=False):
        for curve, style in zip(shared, ("--", ":", "-."), strict=False):
            axes.plot(curve.ratios, curve.scores, color="#999999", linestyle=style, linewidth=1.3, label=curve.label)
        _draw(axes, curves, levels, ticks)
        axes.set_ylim(0, _top(drawn, levels))
        axes.set_title(heading, loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=7, loc="best")
    figure.supxlabel(_XLABEL, fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    if title:
        figure.suptitle(title, fontsize=11)
    return save(figure, path)


def _check(curves: Sequence[Curve]) -> None:
    if not 0 < len(curves) <= MOST_CURVES:
        raise ConfigError(f"a plot holds 1 to {MOST_CURVES} curves, got {len(curves)}")


def _draw(axes: Any, curves: Sequence[Curve], levels: Mapping[str, float], ticks: Sequence[float]) -> None:
    for i, curve in enumerate(curves):
        bars = [
            [max(score - low, 0.0) for score, low in zip(curve.scores, curve.low, strict=True)],
            [max(high - score, 0.0) for score, high in zip(curve.scores, curve.high, strict=True)],
        ]
        axes.errorbar(
            curve.ratios,
            curve.scores,
            yerr=bars,
            label=curve.label,
            color=_COLORS[i],
            marker=_MARKERS[i],
            linestyle="-" if i == 0 else "--",
            linewidth=2.2 if i == 0 else 1.5,
            markersize=6 if i == 0 else 5,
            capsize=3,
            zorder=3 - i / 10,
        )
    for i, (label, level) in enumerate(levels.items()):
        axes.axhline(level, color="#555555", linestyle=(":", "-.")[i % 2], linewidth=1.3, label=label, zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{ratio:g}x" for ratio in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _top(curves: Sequence[Curve], levels: Mapping[str, float]) -> float:
    highest = max([*levels.values(), *(value for curve in curves for value in curve.high)])
    return max(1.0, highest) * 1.05
