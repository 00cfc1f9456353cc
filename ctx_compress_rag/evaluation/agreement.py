"""How closely answers from soft context match those from full text: on any questions, without known answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.decoding.splice import in_batches, open_model, predict, splice
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.answering import FULL, NONE, SOFT, prompt_of
from ctx_compress_rag.evaluation.plots import Curve, plot_scores
from ctx_compress_rag.evaluation.statistics import standard_error
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.prompt import Message
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.text.answers import normalize_answer, token_f1


@dataclass(frozen=True)
class Asked:
    """A question, the passages retrieved for it, and their ids in the store; None takes hashes of their texts."""

    question: str
    passages: tuple[str, ...]
    ids: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Agreement:
    """Two answers to one question: from the passages' full text, and from soft context or none.

    Attributes:
        ratio: source tokens per slot; None if the decoder was given no context.
        full_text: the answer from full text.
        answer: the answer from soft context, or from none.
        f1: token F1 of `answer` against `full_text`, 0 to 1.
        kl: KL(full text || other context) in nats: mean over the tokens of the full-text answer, end token included,
            of the divergence between the next-token distributions. 0 if these are equal. Unlike `f1`, it also shows
            when an answer only just stayed the same.
        prompt_tokens: length of the prompt, a slot counting as one.
    """

    question: str
    ratio: int | None
    full_text: str
    answer: str
    f1: float
    kl: float
    prompt_tokens: int
    full_text_tokens: int

    @property
    def same(self) -> bool:
        """Whether the two answers are the same except for case, punctuation and articles."""
        return normalize_answer(self.answer) == normalize_answer(self.full_text)


@torch.inference_mode()
def agreement(
    store: SoftContextStore,
    asked: Sequence[Asked],
    ratios: Sequence[int] | None = None,
    *,
    max_tokens: int | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> list[Agreement]:
    """Answer each question from full text, from soft context at each ratio and without context; compare the answers.

    All answers are greedy, and quotations if the bundle answers best so. Soft contexts take the path that they take in
    an application: the store, its codec, markers and the splice; missing passages are compressed and stored. The
    answers without context show what the scores are if nothing is read.

    This shows what compression changes, not what is right: a decoder that makes the same errors from text and from
    slots agrees with itself.

    Args:
        store: holds the soft contexts; its bundle answers.
        asked: the questions.
        ratios: source tokens per slot; None takes all that the bundle was trained for and the store can serve.
        max_tokens: longest answer; None takes the bundle's, or 32.
        batch_size: questions per forward pass.
        progress: show a progress bar.

    Returns: one for each question, in order; first for each ratio, then without context (ratio None).
    """
    bundle = store.bundle
    if not isinstance(bundle, Bundle):
        raise ConfigError(f"bundle {bundle.config.name!r} has no decoder: open the store with a Bundle")
    decoder = Decoder(bundle, store, batch_size=batch_size)
    template = bundle.config.template
    tokens = max_tokens or bundle.config.answer_tokens
    sampling = Sampling(max_tokens=tokens, extractive=bundle.config.extractive)
    if ratios is None:
        ratios = [r for r in bundle.config.ratios if bundle.can_read(r, store.base_ratio)] or [store.base_ratio]
    wanted = [*dict.fromkeys(ratios), None]
    found: dict[int | None, list[Agreement]] = {ratio: [] for ratio in wanted}
    with tqdm(total=len(asked), desc="comparing answers", unit="question", disable=not progress) as bar:
        for start in range(0, len(asked), batch_size):
            batch = asked[start : start + batch_size]
            chats = [prompt_of(template, each.passages, each.question) for each in batch]
            full = decoder.generate(chats, sampling)
            answers = [_answer_ids(bundle, generation) for generation in full]
            expected = _log_probs(decoder, chats, answers)
            for ratio in wanted:
                chats = [prompt_of(template, _given(store, each, ratio), each.question) for each in batch]
                less = decoder.generate(chats, sampling)
                losses = zip(expected, _log_probs(decoder, chats, answers), strict=True)
                found[ratio] += [
                    Agreement(
                        question=each.question,
                        ratio=ratio,
                        full_text=text.text.strip(),
                        answer=other.text.strip(),
                        f1=token_f1(other.text, [text.text]),
                        kl=float((p.exp() * (p - q)).sum(dim=-1).mean()),
                        prompt_tokens=other.prompt_tokens,
                        full_text_tokens=text.prompt_tokens,
                    )
                    for each, text, other, (p, q) in zip(batch, full, less, losses, strict=True)
                ]
            bar.update(len(batch))
    return [each for ratio in wanted for each in found[ratio]]


def _given(store: SoftContextStore, asked: Asked, ratio: int | None) -> list[str]:
    if ratio is None:
        return []
    return mark(store, asked.passages, asked.ids, question=asked.question, ratio=ratio)


def _answer_ids(bundle: Bundle, generation: Generation) -> Tensor:
    """The answer's tokens, with the end token unless the answer was cut off: (tokens,), at least one."""
    ids: list[int] = bundle.tokenizer(generation.text, add_special_tokens=False, verbose=False)["input_ids"]
    if generation.finish_reason == "stop" or not ids:
        ids.append(bundle.tokenizer.eos_token_id)
    return torch.tensor(ids)


def _log_probs(decoder: Decoder, chats: Sequence[Sequence[Message]], answers: Sequence[Tensor]) -> list[Tensor]:
    """Log-probabilities of every token at each token of the answers: (answer tokens, vocabulary), float64."""
    bundle = decoder.bundle
    prompts = [prompt.then(answer) for prompt, answer in zip(decoder.preparer.prepare(chats), answers, strict=True)]

    def run(numbers: Sequence[int]) -> list[Tensor]:
        own = [prompts[i] for i in numbers]
        batch = splice(bundle.backbone.embeddings, own)
        with open_model(bundle, own[0].soft, batch.slot_mask) as model:
            logits, _ = predict(model, batch, own)
        log_probs: Tensor = logits.cpu().double().log_softmax(dim=-1)
        return list(log_probs.split([len(answers[i]) for i in numbers]))

    return in_batches(prompts, len(prompts), run)


def worst(agreements: Sequence[Agreement], count: int = 5) -> list[Agreement]:
    """The questions whose answers change at the finest ratios, each at the finest ratio that changes its answer.

    Sorted by ratio, finest first; then by F1 with the full-text answer, lowest first; then by KL, largest first.
    """
    differing = [each for each in agreements if each.ratio is not None and not each.same]
    differing.sort(key=lambda each: (each.ratio, each.f1, -each.kl))
    first: dict[str, Agreement] = {}
    for each in differing:
        first.setdefault(each.question, each)
    return list(first.values())[:count]


def table(agreements: Sequence[Agreement]) -> str:
    """Means by ratio as a Markdown table, ± one standard error."""
    rows = [
        {
            "context": _label(ratio),
            "same answer": f"{sum(a.same for a in group)} of {len(group)}",
            "F1 with full text's": report.mean([a.f1 for a in group]),
            "KL, nats per token": report.mean([a.kl for a in group]),
            "prompt tokens": f"{np.mean([a.prompt_tokens for a in group]):.0f}",
        }
        for ratio, group in _by_ratio(agreements).items()
    ]
    whole = {"context": FULL, "prompt tokens": f"{np.mean([a.full_text_tokens for a in agreements]):.0f}"}
    return report.table([*rows, whole])


def advice(agreements: Sequence[Agreement]) -> str:
    """One sentence: the coarsest ratio whose answers agree with full text's as well as the finest's."""
    groups = {ratio: [a.f1 for a in group] for ratio, group in _by_ratio(agreements).items() if ratio is not None}
    finest = min(groups)
    margin = standard_error(groups[finest]) if len(groups[finest]) > 1 else 0.0
    close = [ratio for ratio, f1 in groups.items() if np.mean(f1) >= np.mean(groups[finest]) - margin]
    return (
        f"Use ratio {max(close)}: its answers agree with full text's as well as those of ratio {finest}, within the "
        f"error (F1 {np.mean(groups[max(close)]):.2f}). Whether full text's are right, only you can say."
    )


def as_text(agreements: Sequence[Agreement]) -> str:
    """Both answers to each question, for people to read."""
    return "\n\n".join(
        f"{each.question}\n    full text: {each.full_text}\n    {_label(each.ratio)}: {each.answer}\n"
        f"    F1 {each.f1:.2f}, KL {each.kl:.3f}"
        for each in agreements
    )


def save(agreements: Sequence[Agreement], folder: str | Path, title: str) -> None:
    folder = report.write(folder, "agreement", table(agreements), [asdict(each) for each in agreements])
    groups = {ratio: [a.f1 for a in group] for ratio, group in _by_ratio(agreements).items()}
    levels = {NONE: float(np.mean(groups[None]))} if None in groups else {}
    points = [
        (ratio, float(np.mean(f1)), standard_error(f1) if len(f1) > 1 else 0.0)
        for ratio, f1 in groups.items()
        if ratio is not None
    ]
    curve = Curve(SOFT, points)
    plot_scores(folder / "agreement.png", [curve], levels, ylabel="F1 with the answer from full text", title=title)


def _by_ratio(agreements: Sequence[Agreement]) -> dict[int | None, list[Agreement]]:
    groups: dict[int | None, list[Agreement]] = {}
    for each in agreements:
        groups.setdefault(each.ratio, []).append(each)
    return groups


def _label(ratio: int | None) -> str:
    return NONE if ratio is None else f"{SOFT} {ratio}x"
