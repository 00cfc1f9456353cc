"""ComprExIT at work on one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from ctx_compress_rag.figures import heat_map, new_figure, width_of
from ctx_compress_rag.methods.comprexit.compressor import ComprexitCompressor
from ctx_compress_rag.text.tokenising import text_ids

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def transmission(bundle: Any, text: str, ratio: int) -> dict[str, Any]:
    """ComprExIT's gates over layers and its transmission plan (its paper's figures 5 and 7b).

    Returns: `transmission.json`, `plan.png`, and `gates.png` unless the bundle reads the last layer alone.
    """
    compressor = cast(ComprexitCompressor, bundle.compressor)
    ids = text_ids(bundle.tokenizer, text)[: bundle.config.max_tokens]
    gates, plan = compressor.transmission(ids, ratio)
    tokens = [bundle.tokenizer.decode([id]) for id in ids]
    numbers = {
        "ratio": ratio,
        "tokens": tokens,
        "mean_gates": None if gates is None else gates.mean(0).tolist(),
        "gates": None if gates is None else gates.tolist(),
        "plan": plan.tolist(),
    }
    files: dict[str, Any] = {"transmission.json": numbers}
    if gates is not None:
        files["gates.png"] = _gates_figure(gates, tokens)
    return files | {"plan.png": _plan_figure(plan, tokens)}


def _gates_figure(gates: Tensor, tokens: Sequence[str]) -> Figure:
    """Mean gate of each layer, and below the gates of each token: (tokens, layers)."""
    count = gates.shape[1]
    figure = new_figure(width_of(tokens), 4.0 + 0.12 * count)
    mean, each = figure.subplots(2, 1, height_ratios=[1.8, 2.2 + 0.12 * count])
    mean.bar(range(1, count + 1), gates.mean(0).numpy(), color="#1f5fa8")
    mean.axhline(1 / count, color="#555555", linestyle=":", linewidth=1.0)
    mean.set(xlabel="layer", ylabel="mean gate", title="Gates by layer; dotted: even")
    mean.spines[["top", "right"]].set_visible(False)
    mean.locator_params(axis="x", integer=True)
    heat_map(each, gates, tokens, first=1)
    each.set(ylabel="layer", title="Gates of each token")
    return figure


def _plan_figure(plan: Tensor, tokens: Sequence[str]) -> Figure:
    """The plan as a heat map, slots from top to bottom: (tokens, slots).

    Shown as shares of a slot: slots of a short last segment carry more of its plan, and would outshine all others.
    """
    figure = new_figure(width_of(tokens), min(12.0, max(3.0, 1.5 + 0.12 * plan.shape[1])))
    axes = figure.subplots()
    heat_map(axes, plan / plan.sum(0), tokens, first=0)
    axes.set(ylabel="slot", title="Transmission plan: how much of each slot comes from each token")
    return figure
