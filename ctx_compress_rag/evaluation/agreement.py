"""Measure how closely answers from less context agree with answers from full text, without known answers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation import answering, report
from ctx_compress_rag.evaluation.answering import DEFAULT, EXTRACTED, FULL, NONE, SOFT, Key
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.evaluation.report import standard_error
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.text.answers import normalize_answer, token_f1

FEWEST = 30
"""Fewest questions to choose a ratio by."""


@dataclass(frozen=True)
class Agreement:
    """Two answers to one question, one from the passages' full text and one from less context."""

    question: str
    system: str  # what the decoder was given in place of full text
    ratio: int | None  # source tokens per slot; None if the decoder was given no context
    full_text: str  # the answer from full text
    answer: str  # the answer from less context
    f1: float  # token F1 of `answer` against `full_text`, 0 to 1
    prompt_tokens: int  # a slot counts as one
    full_text_tokens: int  # of the prompt with full text

    @property
    def same(self) -> bool:
        """Whether the two answers are the same except for case, punctuation and articles."""
        return normalize_answer(self.answer) == normalize_answer(self.full_text)

    @property
    def label(self) -> str:
        """Return the context's name, with its ratio if it has one."""
        return self.system if self.ratio is None else f"{self.system} {self.ratio}x"


def measure_agreement(
    store: SoftContextStore,
    questions: Sequence[Question],
    ratios: Sequence[int] | None = None,
    *,
    ids: Mapping[str, str] | None = None,
    max_tokens: int | None = None,
    batch_size: int = 8,
) -> list[Agreement]:
    """Answer each question from full text and from less context; return a comparison for each context and question.

    The lesser contexts are, at each ratio, what the postprocessors show by default (with one passage, its soft context)
    and as many tokens of the best sentences, and then no context, which shows the scores if nothing is read. Answers
    are greedy, and quotations if the bundle answers best so. Missing passages are compressed and stored.

    A comparison shows what less context changes, not what is right, because a decoder that makes the same errors from
    text and from slots agrees with itself. The default ratios are those that the bundle was trained for and the store
    can serve. `ids` are the passages' ids in the store, by text. A bundle without a decoder raises ConfigError.
    """
    bundle = store.bundle
    if not isinstance(bundle, Bundle):
        raise ConfigError(f"bundle {bundle.config.name!r} has no decoder: open the store with a Bundle")
    if ratios is None:
        ratios = [r for r in bundle.config.ratios if bundle.can_read(r, store.base_ratio)] or [store.base_ratio]
    systems = [FULL, NONE, DEFAULT if answering.shows_several(bundle, questions) else SOFT, EXTRACTED]
    keys = answering.system_ratio_keys(systems, list(dict.fromkeys(ratios)))
    decoder = Decoder(bundle, store, batch_size=batch_size)
    prompts = answering.EvaluationPrompts(decoder, store, bundle.config.template, ids=ids or {})
    sampling = Sampling(max_tokens=max_tokens or bundle.config.answer_tokens, extractive=bundle.config.extractive)
    answers = answering.answer_with_systems(prompts, questions, keys, sampling)
    full = answers.pop((FULL, None))
    whole = list(zip(questions, full.texts, full.prompt_tokens, strict=True))
    return [
        Agreement(q.question, system, ratio, text, other, token_f1(other, [text]), tokens, full_tokens)
        for (system, ratio), given in answers.items()
        for (q, text, full_tokens), other, tokens in zip(whole, given.texts, given.prompt_tokens, strict=True)
    ]


def worst_agreements(agreements: Sequence[Agreement], count: int = 5) -> list[Agreement]:
    """Return at most `count` questions whose answers change, each at the finest ratio that changes its answer.

    The order is by ratio, finest first, then by F1 with full text's answer, lowest first. Best sentences do not count.
    """
    differing = [each for each in agreements if each.ratio is not None and each.system != EXTRACTED and not each.same]
    differing.sort(key=lambda each: (each.ratio, each.f1))
    first: dict[str, Agreement] = {}
    for each in differing:
        first.setdefault(each.question, each)
    return list(first.values())[:count]


def agreement_table(agreements: Sequence[Agreement]) -> str:
    """Return the mean scores of each context as a Markdown table, ± one standard error."""
    rows = [
        {
            "context": group[0].label,
            "same answer": f"{sum(a.same for a in group)} of {len(group)}",
            "F1 with full text's": report.mean_text([a.f1 for a in group]),
            "prompt tokens": f"{np.mean([a.prompt_tokens for a in group]):.0f}",
        }
        for group in _by_context(agreements).values()
    ]
    whole = {"context": FULL, "prompt tokens": f"{np.mean([a.full_text_tokens for a in agreements]):.0f}"}
    return report.markdown_table([*rows, whole])


def agreement_advice(agreements: Sequence[Agreement]) -> str:
    """Return a sentence with the coarsest ratio whose answers agree with full text's as well as the finest ratio's.

    With fewer than `FEWEST` questions, it says that they are too few, because nearly any ratio agrees within the error.
    """
    if (count := len({each.question for each in agreements})) < FEWEST:
        return f"{count} questions are too few to choose a ratio by: ask {FEWEST} or more."
    f1 = {key: np.array([a.f1 for a in group]) for key, group in _by_context(agreements).items()}
    own = {ratio: scores for (system, ratio), scores in f1.items() if system != EXTRACTED and ratio is not None}
    finest = own[min(own)]
    least = finest.mean() - standard_error(finest.tolist())
    ratio = max(ratio for ratio, scores in own.items() if scores.mean() >= least)
    sentences = f1[EXTRACTED, ratio]
    gain = sentences - own[ratio]
    alone = " with text_share=1 (sentences alone)" if gain.mean() > 2 * standard_error(gain.tolist()) else ""
    return (
        f"If full text's answers are right, which only you can say, use ratio {ratio}{alone}: it agrees with them as "
        f"well as ratio {min(own)}, within the error (F1 {own[ratio].mean():.2f}; the best sentences at equal tokens: "
        f"{sentences.mean():.2f})."
    )


def agreement_text(agreements: Sequence[Agreement]) -> str:
    """Return both answers to each question as text for people to read."""
    return "\n\n".join(
        f"{each.question}\n    full text: {each.full_text}\n    {each.label}: {each.answer}\n    F1 {each.f1:.2f}"
        for each in agreements
    )


def save_agreement(agreements: Sequence[Agreement], folder: str | Path) -> None:
    """Write agreement.md and agreement.json into a folder, which is made if needed."""
    text = f"{agreement_table(agreements)}\n\n{agreement_advice(agreements)}"
    report.write_report(folder, "agreement", text, [asdict(each) for each in agreements])


def _by_context(agreements: Sequence[Agreement]) -> dict[Key, list[Agreement]]:
    groups: dict[Key, list[Agreement]] = {}
    for each in agreements:
        groups.setdefault((each.system, each.ratio), []).append(each)
    return groups
