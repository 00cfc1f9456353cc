"""ArcAligner at work on one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.figures import heat_map, new_figure, width_of
from ctx_compress_rag.flops import counting
from ctx_compress_rag.methods.arcaligner.reader import ArcAlignerReader
from ctx_compress_rag.methods.sentence_slots.compressor import SentenceSlotsCompressor
from ctx_compress_rag.text.prompts import PromptBuilder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def refinement(bundle: Any, text: str, ratio: int) -> dict[str, Any]:
    """How many loops ArcAligner's gates give each slot at each layer (its paper's figures 5 and 8 to 10).

    A slot is refined by what it sees, which is what stands before it in the prompt: the beginning of the first
    template that the bundle was trained with, as its config has it. No question after the text could change
    these numbers.

    Returns: `loops.json`, with the operations of this pass and of the same one without LoRA and loops, and `loops.png`.

    Raises:
        ConfigError: the bundle's gates are off.
    """
    reader, compressor = cast(ArcAlignerReader, bundle.reader), cast(SentenceSlotsCompressor, bundle.compressor)
    if not reader.config.loops or not reader.gates:
        raise ConfigError("the bundle's gates are off (loops: 0, or no gated_layers): there are no loops to draw")
    builder = PromptBuilder(bundle.tokenizer)
    [(text, _)] = builder.shortened([text], bundle.config.max_tokens)
    [soft] = bundle.compress([text], ratio)
    template = bundle.config.asked_by
    before, _ = builder.question(template, builder.HOLE, "").ids
    slots = bundle.embed(soft)
    prompt = torch.cat([bundle.backbone.embeddings(before.to(slots.device)), slots])[None]
    is_slot = torch.arange(prompt.shape[1], device=slots.device)[None] >= len(before)
    inputs = {"inputs_embeds": prompt, "use_cache": False, "logits_to_keep": 1}
    with torch.no_grad(), reader.record_loops() as record:
        with bundle.soft_decoder(is_slot) as model, counting() as refined:
            model(**inputs)
        with bundle.backbone.use(None) as frozen, counting() as plain:
            frozen(**inputs)
    layers = sorted(record)
    loops = torch.stack([record[layer][is_slot.cpu()] for layer in layers], dim=1)
    texts = [unit.text for unit in compressor.units(text, ratio, bundle.config.max_tokens)]
    numbers = {
        "template": template,
        "slots": texts,
        "layers": layers,
        "most_loops": reader.config.loops,
        "mean_loops": loops.float().mean(0).tolist(),
        "loops": loops.tolist(),
        "flops": refined.get_total_flops(),
        "flops_of_the_frozen_decoder": plain.get_total_flops(),
    }
    return {"loops.json": numbers, "loops.png": _loops_figure(loops, layers, texts)}


def _loops_figure(loops: Tensor, layers: Sequence[int], slots: Sequence[str]) -> Figure:
    """Mean loops of each gated layer, and below the loops of each slot: (slots, gated layers)."""
    labels = [slot if len(slot) <= 24 else f"{slot[:21]}..." for slot in slots]
    figure = new_figure(width_of(labels), 5.0 + 0.12 * len(layers))
    mean, each = figure.subplots(2, 1, height_ratios=[1.8, 3.2 + 0.12 * len(layers)])
    mean.bar(layers, loops.float().mean(0).numpy(), color="#1f5fa8")
    mean.set(xlabel="layer", ylabel="mean loops", title="Loops by layer, after the mandatory pass")
    mean.spines[["top", "right"]].set_visible(False)
    mean.locator_params(axis="x", integer=True)
    heat_map(each, loops, labels, first=0)
    each.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
    each.set(ylabel="layer", title="Loops of each slot")
    return figure
