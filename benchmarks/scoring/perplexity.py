"""Reconstruction perplexity: how well the decoder reconstructs passages from their slots (ArcAligner, section 4.7)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.splice import answer_token_logits, open_decoder_model, splice_prompts
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.answering import FULL, NONE, SOFT, SystemAnswers
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.text.templates import PARAPHRASES
from ctx_compress_rag.training.examples import recitation_example
from ctx_compress_rag.training.prompts import TrainingPromptBuilder

_TEMPLATE = PARAPHRASES[0]  # its answer is the passage
_LONGEST = 512  # tokens


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of passages' own text, given one kind of context.

    Attributes:
        system: what the decoder was given: the full text (the paper's Base), nothing, or slots.
        ratio: source tokens per slot, None if there are none.
        value: exp of the mean negative log-likelihood of the passages' tokens, end tokens included.
    """

    system: str
    ratio: int | None
    value: float


@torch.inference_mode()
def reconstruction_perplexity(
    bundle: Bundle,
    passages: Sequence[str],
    ratios: Sequence[int],
    *,
    batch_size: int = 8,
    progress: bool = True,
) -> list[Perplexity]:
    """The perplexity of passages' own text given that text, given nothing, and given their slots at each ratio.

    Text is read by the bundle's text decoder, slots by its reader. A bundle that was never trained to reconstruct
    passages does it badly, whatever its slots hold: compare only bundles that were trained alike.

    Args:
        bundle: the bundle to score, of any method.
        passages: held-out passages, none blank; longer ones are cut to 512 tokens.
        ratios: source tokens per slot; for a method that reads the question, only the stored ratio.
        batch_size: passages per forward pass.
        progress: show a progress bar.

    Raises:
        RatioError: the compressor cannot make a ratio.
        ConfigError: a passage is blank.
    """
    builder = TrainingPromptBuilder(bundle.tokenizer, _LONGEST + 1)
    texts = sorted((builder.shortened([passage], _LONGEST)[0][0] for passage in passages), key=len)

    def from_text(batch: Sequence[str], given: bool) -> list[Prompt]:
        return [builder.text_prompt(recitation_example(text), _TEMPLATE, [text if given else ""]) for text in batch]

    def from_slots(batch: Sequence[str], ratio: int) -> list[Prompt]:
        return [
            builder.holed_prompt(recitation_example(text), _TEMPLATE).fill([bundle.embed(soft)])
            for text, soft in zip(batch, _compressed(bundle, batch, ratio), strict=True)
        ]

    systems: list[tuple[str, int | None, Callable[[Sequence[str]], list[Prompt]]]] = [
        (FULL, None, partial(from_text, given=True)),
        (NONE, None, partial(from_text, given=False)),
        *((SOFT, ratio, partial(from_slots, ratio=ratio)) for ratio in ratios),
    ]
    scores: list[Perplexity] = []
    for system, ratio, make in tqdm(systems, desc="perplexity", unit="system", disable=not progress):
        batches = [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]
        losses = torch.cat([_losses(bundle, make(batch)) for batch in batches])
        scores.append(Perplexity(system, ratio, math.exp(losses.mean())))
    return scores


def _compressed(bundle: Bundle, texts: Sequence[str], ratio: int) -> list[SoftContext]:
    """Soft contexts as a store would give them: merged from the base ratio if the method allows it."""
    if not bundle.compressor.nestable:
        return bundle.compress(texts, ratio)
    return [soft.merge(ratio // bundle.config.base_ratio) for soft in bundle.compress(texts)]


def _losses(bundle: Bundle, prompts: Sequence[Prompt]) -> Tensor:
    """Negative log-likelihoods of the answers' tokens, prompt after prompt: (answer tokens,), float64 on the CPU."""
    batch = splice_prompts(bundle.backbone.inputs, prompts)
    with open_decoder_model(bundle, prompts[0].side, batch.slot_mask) as model:
        logits, answers = answer_token_logits(model, batch, prompts)
    return F.cross_entropy(logits, answers, reduction="none").double().cpu()


def perplexity_table(scores: Sequence[Perplexity]) -> str:
    """The perplexities as a Markdown table."""
    return report.markdown_table(
        [
            {"context": s.system, "ratio": report.ratio_text(s.ratio), "reconstruction perplexity": f"{s.value:.4g}"}
            for s in scores
        ]
    )


@dataclass(frozen=True)
class PerplexityTable:
    """An extra table of `evaluate_sets`: how well the set's passages are reconstructed from their slots."""

    ratios: Sequence[int]

    def __call__(
        self, bundle: Bundle, questions: Sequence[Question], answers: SystemAnswers, folder: Path
    ) -> tuple[str, Any]:
        """The table, and its numbers."""
        passages = list(dict.fromkeys(passage for question in questions for passage in question.passages))
        scores = reconstruction_perplexity(bundle, passages, self.ratios)
        return perplexity_table(scores), [asdict(each) for each in scores]
