"""What a bundle does with one text, as pictures and numbers. A method that can be looked into adds one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.decoding.splice import splice
from ctx_compress_rag.errors import ConfigError, RatioError
from ctx_compress_rag.evaluation.figures import new_figure, save
from ctx_compress_rag.methods.arcaligner.reader import ArcAlignerReader
from ctx_compress_rag.methods.comprexit.compressor import ComprexitCompressor
from ctx_compress_rag.methods.sentence_slots.compressor import SentenceSlotsCompressor
from ctx_compress_rag.text.prompts import TEMPLATES, PromptBuilder
from ctx_compress_rag.text.tokenising import text_ids

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# More labels than this on one axis cannot be read.
_MOST_LABELS = 64


def inspect(bundle: Bundle, text: str, folder: str | Path, ratio: int | None = None) -> list[Path]:
    """Draw what the bundle's method does with a text, and write the numbers beside the pictures.

    Args:
        bundle: of a method that has pictures.
        text: the text; what does not fit into the bundle's window of `config.max_tokens` is left out.
        folder: where the files go; it is made.
        ratio: source tokens per slot; None takes the bundle's base ratio.

    Returns:
        The files.

    Raises:
        ConfigError: the method has no pictures, or the text is blank.
        RatioError: the ratio does not divide the window.
        MissingExtraError: matplotlib is not installed.
    """
    method = bundle.config.method.name
    if method not in PICTURES:
        raise ConfigError(f"method {method!r} has no pictures: give a bundle of {' or '.join(sorted(PICTURES))}")
    if not text.strip():
        raise ConfigError("the text is blank: there is nothing to look into")
    ratio = bundle.config.base_ratio if ratio is None else ratio
    if ratio < 1 or bundle.config.max_tokens % ratio:
        raise RatioError(f"ratio {ratio} does not divide the bundle's window of {bundle.config.max_tokens} tokens")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return PICTURES[method](bundle, text, folder, ratio)


def transmission(bundle: Bundle, text: str, folder: Path, ratio: int) -> list[Path]:
    """ComprExIT's gates over layers and its transmission plan (paper 002, figures 5 and 7b).

    Writes `transmission.json`, `plan.png`, and `gates.png` unless the bundle reads the last layer alone.
    """
    assert isinstance(bundle.compressor, ComprexitCompressor)
    ids = text_ids(bundle.tokenizer, text)[: bundle.config.max_tokens]
    gates, plan = bundle.compressor.transmission(ids, ratio)
    tokens = [bundle.tokenizer.decode([id]) for id in ids]
    numbers = {
        "bundle": bundle.config.name,
        "fingerprint": bundle.fingerprint,
        "ratio": ratio,
        "tokens": tokens,
        "mean_gates": None if gates is None else gates.mean(0).tolist(),
        "gates": None if gates is None else gates.tolist(),
        "plan": plan.tolist(),
    }
    path = folder / "transmission.json"
    path.write_text(json.dumps(numbers, ensure_ascii=False) + "\n", encoding="utf-8")
    files = [path]
    if gates is not None:
        files.append(save(_gates_figure(gates, tokens), folder / "gates.png"))
    files.append(save(_plan_figure(plan, tokens), folder / "plan.png"))
    return files


def _gates_figure(gates: Tensor, tokens: Sequence[str]) -> Figure:
    """Mean gate of each layer, and below the gates of each token: (tokens, layers)."""
    count = gates.shape[1]
    figure = new_figure(_width(tokens), 4.0 + 0.12 * count)
    mean, each = figure.subplots(2, 1, height_ratios=[1.8, 2.2 + 0.12 * count])
    mean.bar(range(1, count + 1), gates.mean(0).numpy(), color="#1f5fa8")
    mean.axhline(1 / count, color="#555555", linestyle=":", linewidth=1.0)
    mean.set(xlabel="layer", ylabel="mean gate", title="Gates by layer; dotted: even")
    mean.spines[["top", "right"]].set_visible(False)
    mean.locator_params(axis="x", integer=True)
    _heat_map(each, gates, tokens, first=1)
    each.set(ylabel="layer", title="Gates of each token")
    return figure


def _plan_figure(plan: Tensor, tokens: Sequence[str]) -> Figure:
    """The plan as a heat map, slots from top to bottom: (tokens, slots).

    Shown as shares of a slot: slots of a short last segment carry more of its plan, and would outshine all others.
    """
    figure = new_figure(_width(tokens), min(12.0, max(3.0, 1.5 + 0.12 * plan.shape[1])))
    axes = figure.subplots()
    _heat_map(axes, plan / plan.sum(0), tokens, first=0)
    axes.set(ylabel="slot", title="Transmission plan: how much of each slot comes from each token")
    return figure


def _heat_map(axes: Any, values: Tensor, tokens: Sequence[str], first: int) -> None:
    """Tokens from left to right, and from top to bottom what is counted from `first`: (tokens, rows)."""
    places = (-0.5, len(tokens) - 0.5, first + values.shape[1] - 0.5, first - 0.5)
    image = axes.imshow(values.T.numpy(), aspect="auto", cmap="viridis", vmin=0, extent=places)
    axes.figure.colorbar(image, ax=axes)
    axes.locator_params(axis="y", integer=True)
    if len(tokens) > _MOST_LABELS:
        axes.set_xlabel("token")
        return
    # matplotlib takes what is between dollars for mathematics.
    labels = [token.strip(" ").replace("$", r"\$").replace("\n", "\\n") for token in tokens]
    axes.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=7)


def _width(tokens: Sequence[str]) -> float:
    return min(14.0, max(6.0, 2.0 + 0.18 * len(tokens)))


def refinement(bundle: Bundle, text: str, folder: Path, ratio: int) -> list[Path]:
    """How many loops ArcAligner's gates give each slot at each layer (paper 000, figures 5 and 8 to 10).

    A slot is refined by what it sees, which is what stands before it in the prompt: the beginning of the first
    template that the bundle was trained with, as its report has it. No question after the text could change
    these numbers. Writes `loops.json` and `loops.png`.

    Raises:
        ConfigError: the bundle's gates are off.
    """
    reader, compressor = bundle.reader, bundle.compressor
    assert isinstance(reader, ArcAlignerReader) and isinstance(compressor, SentenceSlotsCompressor)
    if not reader.config.loops or not reader.gates:
        raise ConfigError("the bundle's gates are off (loops: 0, or no gated_layers): there are no loops to draw")
    builder = PromptBuilder(bundle.tokenizer)
    [(text, _)] = builder.shortened([text], bundle.config.max_tokens)
    [soft] = bundle.compress([text], ratio)
    template = bundle.report.get("recipe", {}).get("data", {}).get("templates", TEMPLATES)[0]
    before = builder.slot_row(Example((text,), (Turn("", ("",)),)), template).ids[0]
    batch = splice(bundle.backbone.embeddings, [[before, bundle.embed(soft)]])
    with torch.no_grad(), reader.record_loops() as record, bundle.soft_decoder(batch.slot_mask) as model:
        model(**batch.model_inputs(), use_cache=False, logits_to_keep=1)
    layers = sorted(record)
    loops = torch.stack([record[layer][batch.slot_mask.cpu()] for layer in layers], dim=1)
    slots = [unit.text for unit in compressor.units(text, ratio, bundle.config.max_tokens)]
    numbers = {
        "bundle": bundle.config.name,
        "fingerprint": bundle.fingerprint,
        "template": template,
        "slots": slots,
        "layers": layers,
        "most_loops": reader.config.loops,
        "mean_loops": loops.float().mean(0).tolist(),
        "loops": loops.tolist(),
    }
    path = folder / "loops.json"
    path.write_text(json.dumps(numbers, ensure_ascii=False) + "\n", encoding="utf-8")
    return [path, save(_loops_figure(loops, layers, slots), folder / "loops.png")]


def _loops_figure(loops: Tensor, layers: Sequence[int], slots: Sequence[str]) -> Figure:
    """Mean loops of each gated layer, and below the loops of each slot: (slots, gated layers)."""
    labels = [slot if len(slot) <= 24 else f"{slot[:21]}..." for slot in slots]
    figure = new_figure(_width(labels), 5.0 + 0.12 * len(layers))
    mean, each = figure.subplots(2, 1, height_ratios=[1.8, 3.2 + 0.12 * len(layers)])
    mean.bar(layers, loops.float().mean(0).numpy(), color="#1f5fa8")
    mean.set(xlabel="layer", ylabel="mean loops", title="Loops by layer, after the mandatory pass")
    mean.spines[["top", "right"]].set_visible(False)
    mean.locator_params(axis="x", integer=True)
    _heat_map(each, loops, labels, first=0)
    each.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
    each.set(ylabel="layer", title="Loops of each slot")
    return figure


PICTURES: dict[str, Callable[[Bundle, str, Path, int], list[Path]]] = {
    "arcaligner": refinement,
    "comprexit": transmission,
}
"""For each method that has pictures, what draws them: (bundle, text, folder, ratio) -> the files."""
