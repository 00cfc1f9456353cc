"""How a passage's tokens are distributed over its slots (ComprExIT, figures 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ctx_compress_rag.evaluation.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Allocation(NamedTuple):
    """How similar the aggregation weights of a passage's slots are.

    Attributes:
        correlation: Pearson correlation between the weights of each two slots (figure 3): (slots, slots).
        singular_values: of the matrix of weights, as shares of their sum, largest first (figure 4): (slots,).
        effective_rank: exponential of the entropy of these shares (Roy and Vetterli, 2007): 1 to the number of slots.
        overlap: mean absolute correlation of two different slots; None if there is only one slot.
    """

    correlation: Tensor
    singular_values: Tensor
    effective_rank: float
    overlap: float | None

    def numbers(self) -> dict[str, object]:
        """The values in JSON types."""
        return {name: each.tolist() if isinstance(each, Tensor) else each for name, each in self._asdict().items()}


def allocation(weights: Tensor) -> Allocation:
    """Compare the slots of one passage.

    Args:
        weights: how much of each slot comes from each token: (tokens, slots). Each slot's are normalized here.
    """
    rows = (weights / weights.sum(0)).T.double()
    values = torch.linalg.svdvals(rows)
    shares = values / values.sum()
    count = len(rows)
    correlation = torch.corrcoef(rows).view(count, count).nan_to_num()  # uniform weights correlate with nothing
    others = correlation.abs().sum() - correlation.diagonal().abs().sum()
    return Allocation(
        correlation.float(),
        shares.float(),
        float(torch.special.entr(shares).sum().exp()),
        float(others / (count * (count - 1))) if count > 1 else None,
    )


def allocation_figure(found: Allocation) -> Figure:
    """Plot the correlations on the left and the spectrum on the right."""
    figure = new_figure(9.0, 3.6)
    left, right = figure.subplots(1, 2)
    image = left.imshow(found.correlation.numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
    figure.colorbar(image, ax=left)
    left.set(xlabel="slot", ylabel="slot", title="Correlation of two slots' weights over tokens")
    right.plot(range(1, len(found.singular_values) + 1), found.singular_values.numpy(), "o-", markersize=3)
    rank = f"effective rank {found.effective_rank:.1f} of {len(found.singular_values)}"
    right.set(xlabel="singular value", ylabel="share of their sum", ylim=(0, None), title=f"Spectrum, {rank}")
    right.spines[["top", "right"]].set_visible(False)
    return figure


def allocation_means(found: Sequence[Allocation]) -> dict[str, float | None]:
    """Means over passages: effective rank as a share of the slots, and overlap over passages with two slots or more."""
    overlaps = [each.overlap for each in found if each.overlap is not None]
    return {
        "effective_rank_share": sum(each.effective_rank / len(each.singular_values) for each in found) / len(found),
        "overlap": sum(overlaps) / len(overlaps) if overlaps else None,
    }
