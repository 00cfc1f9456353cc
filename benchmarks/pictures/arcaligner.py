"""Pictures of ArcAligner: how often its gates refine each slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.pictures.axes import heat_map, layer_bars, width_of
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation.plots import new_figure
from ctx_compress_rag.methods.arcaligner.reader import ArcAlignerReader
from ctx_compress_rag.methods.sentence_slots.compressor import SentenceSlotsCompressor
from ctx_compress_rag.models.flops import counting
from ctx_compress_rag.training.prompts import PromptBuilder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _Refined(NamedTuple):
    """A text that was read: its slots' texts, their loops (slots, gated layers), and the operations needed."""

    slots: list[str]
    loops: Tensor
    layers: list[int]
    flops: int
    plain_flops: int


def refinement(bundle: Any, texts: Sequence[str], ratio: int) -> dict[str, Any]:
    """How many loops ArcAligner's gates give each slot at each layer (its paper's figures 5 and 8 to 10).

    A slot's refinement depends on what precedes it in the prompt: here the beginning of the first template
    that the bundle was trained with, from its config. A question after the text could not change these
    numbers.

    Returns: `loops.json`, with the operations of these passes and of the same passes without LoRA and loops, and
        `loops.png`; for several texts the mean over all of their slots (figure 5).

    Raises:
        ConfigError: the bundle's gates are off.
    """
    reader = cast(ArcAlignerReader, bundle.reader)
    if not reader.config.loops or not reader.gates:
        raise ConfigError("the bundle's gates are off (loops: 0, or no gated_layers): there are no loops to plot")
    read = [_read(bundle, text, ratio) for text in texts]
    loops, layers = torch.cat([each.loops for each in read]), read[0].layers
    numbers = {
        "template": bundle.config.template,
        "layers": layers,
        "most_loops": reader.config.loops,
        "mean_loops": loops.float().mean(0).tolist(),
        "flops": sum(each.flops for each in read),
        "flops_of_the_frozen_decoder": sum(each.plain_flops for each in read),
    }
    if len(texts) > 1:
        numbers |= {"passages": len(texts), "slots": len(loops)}
        figure = new_figure(6.0, 3.0)
        _plot_mean(figure.subplots(), loops, layers)
        return {"loops.json": numbers, "loops.png": figure}
    slots = read[0].slots
    numbers |= {"slots": slots, "loops": loops.tolist()}
    return {"loops.json": numbers, "loops.png": _loops_figure(loops, layers, slots)}


def _read(bundle: Any, text: str, ratio: int) -> _Refined:
    reader, compressor = cast(ArcAlignerReader, bundle.reader), cast(SentenceSlotsCompressor, bundle.compressor)
    builder = PromptBuilder(bundle.tokenizer)
    [(text, _)] = builder.shortened([text], bundle.config.max_tokens)
    [soft] = bundle.compress([text], ratio)
    before, *_ = builder.holed_prompt(Example((text,), (Turn("", ("",)),)), bundle.config.template).ids
    slots = bundle.embed(soft)
    prompt = torch.cat([bundle.backbone.embeddings(before.to(slots.device)), slots])[None]
    is_slot = torch.arange(prompt.shape[1], device=slots.device)[None] >= len(before)
    inputs = {"inputs_embeds": prompt, "use_cache": False, "logits_to_keep": 1}
    with torch.no_grad():
        with bundle.soft_decoder(is_slot) as model, counting() as refined:
            model(**inputs)
        with bundle.backbone.use(None) as frozen, counting() as plain:
            frozen(**inputs)
    layers = sorted(reader.last_loops)
    loops = torch.stack([reader.last_loops[layer][is_slot].cpu() for layer in layers], dim=1)
    units = [unit.text for unit in compressor.units(text, ratio, bundle.config.max_tokens)]
    return _Refined(units, loops, layers, refined.get_total_flops(), plain.get_total_flops())


def _plot_mean(axes: Any, loops: Tensor, layers: Sequence[int]) -> None:
    """Plot the mean loops of each gated layer: (slots, gated layers)."""
    layer_bars(axes, layers, loops.float().mean(0), "mean loops", "Loops by layer, after the mandatory pass")


def _loops_figure(loops: Tensor, layers: Sequence[int], slots: Sequence[str]) -> Figure:
    """Plot the mean loops of each gated layer, and below them the loops of each slot: (slots, gated layers)."""
    labels = [slot if len(slot) <= 24 else f"{slot[:21]}..." for slot in slots]
    figure = new_figure(width_of(labels), 5.0 + 0.12 * len(layers))
    mean, each = figure.subplots(2, 1, height_ratios=[1.8, 3.2 + 0.12 * len(layers)])
    _plot_mean(mean, loops, layers)
    heat_map(each, loops, labels, first=0)
    each.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
    each.set(ylabel="layer", title="Loops of each slot")
    return figure
