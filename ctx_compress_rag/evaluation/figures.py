"""Pictures drawn without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ctx_compress_rag.extras import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; `width` and `height` are in inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs("demo"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as a PNG; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path
