"""Parts of figures: maps and bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

# More labels than this on one axis cannot be read.
_MOST_LABELS = 64


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
