"""Pictures of ComprExIT: its gates and its transmission plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from benchmarks.pictures.allocation import Allocation, allocation, allocation_figure, allocation_means
from benchmarks.pictures.axes import heat_map, layer_bars, width_of
from ctx_compress_rag.evaluation.plots import new_figure
from ctx_compress_rag.methods.comprexit.compressor import ComprexitCompressor
from ctx_compress_rag.text.tokenizing import text_ids

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def transmission(bundle: Any, texts: Sequence[str], ratio: int) -> dict[str, Any]:
    """ComprExIT's gates over layers and its transmission plan (its paper's figures 3, 4, 5 and 7b).

    Returns: for one text `transmission.json`, `plan.png`, `allocation.png`, and `gates.png` unless the bundle reads
        only the last layer; for several, their means in `transmission.json` and, with the same exception, `gates.png`.
    """
    compressor = cast(ComprexitCompressor, bundle.compressor)
    passages = [text_ids(bundle.tokenizer, text)[: bundle.config.max_tokens] for text in texts]
    seen = [_transmission(compressor, ids, ratio) for ids in passages]
    found = [allocation(plan) for _, plan in seen]
    if len(texts) > 1:
        return _means([gates for gates, _ in seen if gates is not None], found, ratio)
    [ids], [(gates, plan)] = passages, seen
    tokens = [bundle.tokenizer.decode([id]) for id in ids]
    numbers = {
        "ratio": ratio,
        "tokens": tokens,
        "mean_gates": None if gates is None else gates.mean(0).tolist(),
        "gates": None if gates is None else gates.tolist(),
        "plan": plan.tolist(),
        **found[0].numbers(),
    }
    files: dict[str, Any] = {"transmission.json": numbers}
    if gates is not None:
        files["gates.png"] = _gates_figure(gates, tokens)
    return files | {"plan.png": _plan_figure(plan, tokens), "allocation.png": allocation_figure(found[0])}


@torch.inference_mode()
def _transmission(compressor: ComprexitCompressor, ids: Sequence[int], ratio: int) -> tuple[Tensor | None, Tensor]:
    """How a passage's information flows into its slots, read in one window; on the CPU.

    Returns:
        how much of each layer goes into each token's anchor (alpha, eq. 6): (tokens, layers); None without layer
        aggregation. And how much of each token goes into each slot (Pi, eq. 11): (tokens, slots); each segment's part
        sums to 1.
    """
    input_ids = torch.tensor([ids], device=compressor.backbone.device)
    states = compressor.hidden_states(input_ids)
    segments = compressor.transport(compressor.anchors(states), torch.ones_like(input_ids), ratio)
    plans = [plan[: int(counts.sum()), counts > 0] for plan, counts in zip(segments.plan, segments.counts, strict=True)]
    gates = None if compressor.depth is None else compressor.depth.gates(states)[0].cpu()
    return gates, torch.block_diag(*plans).cpu()


def _means(gates: Sequence[Tensor], found: Sequence[Allocation], ratio: int) -> dict[str, Any]:
    """Means over passages: the gates of all their tokens, and how tokens are distributed over slots."""
    numbers = {"ratio": ratio, "passages": len(found), **allocation_means(found)}
    if not gates:
        return {"transmission.json": {**numbers, "mean_gates": None}}
    mean = torch.cat(list(gates)).mean(0)
    figure = new_figure(6.0, 3.0)
    _plot_mean(figure.subplots(), mean)
    return {"transmission.json": {**numbers, "mean_gates": mean.tolist()}, "gates.png": figure}


def _gates_figure(gates: Tensor, tokens: Sequence[str]) -> Figure:
    """Plot the mean gate of each layer, and below it the gates of each token: (tokens, layers)."""
    count = gates.shape[1]
    figure = new_figure(width_of(tokens), 4.0 + 0.12 * count)
    mean, each = figure.subplots(2, 1, height_ratios=[1.8, 2.2 + 0.12 * count])
    _plot_mean(mean, gates.mean(0))
    heat_map(each, gates, tokens, first=1)
    each.set(ylabel="layer", title="Gates of each token")
    return figure


def _plot_mean(axes: Any, gates: Tensor) -> None:
    """Plot the mean gate of each layer: (layers,)."""
    layer_bars(axes, range(1, len(gates) + 1), gates, "mean gate", "Gates by layer; dotted: even")
    axes.axhline(1 / len(gates), color="#555555", linestyle=":", linewidth=1.0)


def _plan_figure(plan: Tensor, tokens: Sequence[str]) -> Figure:
    """Plot the plan as a heat map, slots from top to bottom: (tokens, slots).

    Values are shares of a slot: slots of a short last segment have more of its plan, and would outshine all others.
    """
    figure = new_figure(width_of(tokens), min(12.0, max(3.0, 1.5 + 0.12 * plan.shape[1])))
    axes = figure.subplots()
    heat_map(axes, plan / plan.sum(0), tokens, first=0)
    axes.set(ylabel="slot", title="Transmission plan: how much of each slot comes from each token")
    return figure
