"""How well the decoder reconstructs passages from their slots: perplexity (ArcAligner, section 4.7), and accuracy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
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
from ctx_compress_rag.training.prompts import TrainingPromptBuilder, recitation_example

_TEMPLATE = PARAPHRASES[0]  # its answer is the passage
_LONGEST = 512  # tokens
_PLACES = (0, 8, 32, 128, _LONGEST + 1)


@dataclass(frozen=True)
class Perplexity:
    """How well passages' own text is predicted, given one kind of context.

    Attributes:
        system: what the decoder was given: the full text (the paper's Base), nothing, or slots.
        ratio: source tokens per slot, None if there are none.
        value: exp of the mean negative log-likelihood of the passages' tokens, end tokens included.
        right: share of tokens that the decoder predicts after the right ones before, by their places in a passage.
    """

    system: str
    ratio: int | None
    value: float
    right: dict[str, float]


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
        losses, right, places = torch.cat([_scored(bundle, make(batch)) for batch in batches]).T
        parts = [(a, b, right[(places >= a) & (places < b)]) for a, b in pairwise(_PLACES)]
        by_place = {f"{a + 1} to {b}": float(part.mean()) for a, b, part in parts if len(part)}
        scores.append(Perplexity(system, ratio, math.exp(losses.mean()), by_place))
    return scores


def _compressed(bundle: Bundle, texts: Sequence[str], ratio: int) -> list[SoftContext]:
    """Soft contexts as a store would give them: merged from the base ratio if the method allows it."""
    if not bundle.compressor.nestable:
        return bundle.compress(texts, ratio)
    return [soft.merge(ratio // bundle.config.base_ratio) for soft in bundle.compress(texts)]


def _scored(bundle: Bundle, prompts: Sequence[Prompt]) -> Tensor:
    """Of each token of the prompts' answers: negative log-likelihood, whether it is predicted, its place in the answer.

    Returns: (answer tokens, 3), float64 on the CPU, prompt after prompt.
    """
    batch = splice_prompts(bundle.backbone.inputs, prompts)
    with open_decoder_model(bundle, prompts[0].side, batch.slot_mask) as model:
        logits, answers = answer_token_logits(model, batch, prompts)
    losses, right = F.cross_entropy(logits, answers, reduction="none"), logits.argmax(-1) == answers
    places = torch.cat([torch.arange(int(prompt.answers.sum())) for prompt in prompts])
    return torch.stack([each.double().cpu() for each in (losses, right, places)], dim=1)


def perplexity_table(scores: Sequence[Perplexity]) -> str:
    """The perplexities as a Markdown table."""
    return report.markdown_table(
        [
            {"context": s.system, "ratio": report.ratio_text(s.ratio), "reconstruction perplexity": f"{s.value:.4g}"}
            | {f"right, tokens {places}": f"{share:.3f}" for places, share in s.right.items()}
            for s in scores
        ]
    )


@dataclass(frozen=True)
class PerplexityTable:
    """A table beside that of `evaluate_sets`: how well the set's passages are reconstructed from their slots."""

    ratios: Sequence[int]

    def __call__(
        self, bundle: Bundle, questions: Sequence[Question], answers: SystemAnswers, folder: Path
    ) -> tuple[str, Any]:
        """The table, and its numbers."""
        passages = list(dict.fromkeys(passage for question in questions for passage in question.passages))
        scores = reconstruction_perplexity(bundle, passages, self.ratios)
        return perplexity_table(scores), [asdict(each) for each in scores]
