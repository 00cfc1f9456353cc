"""Several plots of score against compression ratio side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation.report import XLABEL, ScoreCurve, draw_curves, new_figure, save_figure


def plot_panels(
    path: str | Path,
    panels: Mapping[str, Sequence[ScoreCurve]],
    shared: Sequence[ScoreCurve],
    levels: Mapping[str, float],
    ticks: Sequence[float],
    *,
    ylabel: str = "answer F1",
    title: str | None = None,
) -> Path:
    """Save several plots of score against ratio side by side, on the same axes, as one PNG.

    `panels` has the curves of each plot by its heading, `shared` those that every plot shows in grey, and `levels`
    scores that have no ratio, drawn as horizontal lines.
    """
    if not panels:
        raise ConfigError("there is nothing to plot: no panels")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.4 * columns, 3.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (heading, curves) in zip(grid.flat, panels.items(), strict=False):
        for curve, style in zip(shared, ("--", ":", "-."), strict=False):
            ratios, scores, _ = zip(*curve.points, strict=True)
            axes.plot(ratios, scores, color="#999999", linestyle=style, linewidth=1.3, label=curve.label)
        draw_curves(axes, curves, levels, ticks)
        axes.set_title(heading, loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=7, loc="best")
    figure.supxlabel(XLABEL, fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    if title:
        figure.suptitle(title, fontsize=11)
    return save_figure(figure, path)
