"""Reconstruction perplexity: how well the decoder reconstructs passages from their slots (ArcAligner, section 4.7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.decoding.splice import Piece, splice
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.harness import FULL, NONE, SOFT
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.text.prompts import PARAPHRASES, PromptBuilder
from ctx_compress_rag.training.objectives.base import predict
from ctx_compress_rag.training.objectives.reconstruction import recited


@dataclass(frozen=True)
class Perplexity:
    """What the passages' own text is to the decoder.

    Attributes:
        system: what the decoder was given: the full text (the paper's Base), nothing, or slots.
        ratio: source tokens per slot, None where there are none.
        value: exp of the mean negative log-likelihood of the passages' tokens, end tokens included.
    """

    system: str
    ratio: int | None
    value: float


class _Row(NamedTuple):
    """A prompt with its answer, and where the answer is: bool (row length,)."""

    pieces: list[Piece]
    answers: Tensor


@torch.inference_mode()
def reconstruction_perplexity(
    bundle: Bundle,
    passages: Sequence[str],
    ratios: Sequence[int],
    *,
    template: str = PARAPHRASES[0],
    max_tokens: int = 512,
    batch_size: int = 8,
    progress: bool = True,
) -> list[Perplexity]:
    """The perplexity of passages' own text given that text, given nothing, and given their slots at each ratio.

    Text is read by the bundle's text decoder, slots by its reader. A bundle that was never trained to
    say passages again does so badly, whatever its slots hold: compare bundles of like training.

    Args:
        bundle: what is scored, of any method.
        passages: held-out passages, none blank.
        ratios: source tokens per slot; of a method that waits for a question, only the stored one.
        template: a prompt with a {context}, whose answer is the passage.
        max_tokens: longer passages are cut to it.
        batch_size: passages per forward pass.
        progress: show a progress bar.

    Raises:
        RatioError: the compressor cannot make a ratio.
        ConfigError: a passage is blank.
    """
    builder = PromptBuilder(bundle.tokenizer, max_tokens + 1)
    dtype = bundle.backbone.embeddings.weight.dtype  # the reader's may be wider
    texts = sorted((builder.shortened([passage], max_tokens)[0][0] for passage in passages), key=len)

    def from_text(batch: Sequence[str], given: bool) -> list[_Row]:
        rows = [builder.text_row(recited(text), template, [text if given else ""]) for text in batch]
        return [_Row([row.ids], row.answers) for row in rows]

    def from_slots(batch: Sequence[str], ratio: int) -> list[_Row]:
        return [
            _with_slots(builder, template, text, bundle.embed(soft).to(dtype))
            for text, soft in zip(batch, _compressed(bundle, batch, ratio), strict=True)
        ]

    def text_decoder(_: Tensor) -> AbstractContextManager[Any]:
        return bundle.text_decoder()

    systems: list[tuple[str, int | None, Callable[[Sequence[str]], list[_Row]], _Decoder]] = [
        (FULL, None, partial(from_text, given=True), text_decoder),
        (NONE, None, partial(from_text, given=False), text_decoder),
        *((SOFT, ratio, partial(from_slots, ratio=ratio), bundle.soft_decoder) for ratio in ratios),
    ]
    scores: list[Perplexity] = []
    for system, ratio, make, decoder in tqdm(systems, desc="perplexity", unit="system", disable=not progress):
        losses = torch.cat(
            [
                _losses(bundle, make(texts[start : start + batch_size]), decoder)
                for start in range(0, len(texts), batch_size)
            ]
        )
        scores.append(Perplexity(system, ratio, math.exp(losses.mean())))
    return scores


_Decoder = Callable[[Tensor], AbstractContextManager[Any]]
"""From where the slots are to the model that reads the rows."""


def _compressed(bundle: Bundle, texts: Sequence[str], ratio: int) -> list[SoftContext]:
    """Soft contexts as a store would give them: merged from the base ratio where the method allows it."""
    if not bundle.compressor.nestable:
        return bundle.compress(texts, ratio)
    return [bundle.at_ratio(soft, ratio) for soft in bundle.compress(texts)]


def _with_slots(builder: PromptBuilder, template: str, text: str, slots: Tensor) -> _Row:
    row = builder.slot_row(recited(text), template)
    no_answer = torch.zeros(len(slots), dtype=torch.bool)
    return _Row([row.ids[0], slots, row.ids[1]], torch.cat((row.answers[0], no_answer, row.answers[1])))


def _losses(bundle: Bundle, rows: Sequence[_Row], decoder: _Decoder) -> Tensor:
    """Negative log-likelihoods of the answers' tokens, row after row: (answer tokens,), float64 on the CPU."""
    pieces = [row.pieces for row in rows]
    spliced = splice(bundle.backbone.embeddings, pieces, "left")
    with decoder(spliced.slot_mask) as model:
        logits, answers = predict(model, spliced.model_inputs(), pieces, [row.answers for row in rows])
    return F.cross_entropy(logits, answers, reduction="none").double().cpu()


def perplexity_table(scores: Sequence[Perplexity]) -> str:
    """The perplexities as a Markdown table."""
    return report.table(
        [
            {"context": s.system, "ratio": report.times(s.ratio), "reconstruction perplexity": f"{s.value:.4g}"}
            for s in scores
        ]
    )
