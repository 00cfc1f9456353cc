"""Figures, plotted without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ctx_compress_rag.extras import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# More labels than this on one axis cannot be read.
_MOST_LABELS = 64


def check_plots() -> None:
    """Fail early if plots cannot be made, before long work that ends with one.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs("train"):
        import matplotlib  # noqa: F401


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; `width` and `height` are in inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs("train"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    # Without pyplot, whose backend belongs to the calling notebook or program.
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as a PNG, creating its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def heat_map(axes: Any, values: Tensor, tokens: Sequence[str], first: int) -> None:
    """Plot (tokens, rows): tokens from left to right, rows from top to bottom, counted from `first`."""
    places = (-0.5, len(tokens) - 0.5, first + values.shape[1] - 0.5, first - 0.5)
    image = axes.imshow(values.T.numpy(), aspect="auto", cmap="viridis", vmin=0, extent=places)
    axes.figure.colorbar(image, ax=axes)
    axes.locator_params(axis="y", integer=True)
    if len(tokens) > _MOST_LABELS:
        axes.set_xlabel("token")
        return
    # matplotlib reads text between dollar signs as mathematics.
    labels = [token.strip(" ").replace("$", r"\$").replace("\n", "\\n") for token in tokens]
    axes.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=7)


def layer_bars(axes: Any, layers: Sequence[int], values: Tensor, ylabel: str, title: str) -> None:
    """Plot a bar for each layer: (layers,)."""
    axes.bar(layers, values.numpy(), color="#1f5fa8")
    axes.set(xlabel="layer", ylabel=ylabel, title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", integer=True)


def width_of(labels: Sequence[str]) -> float:
    """The width in inches of a figure with these labels side by side."""
    return min(14.0, max(6.0, 2.0 + 0.18 * len(labels)))
