"""Score a bundle beside its baselines, on the same questions with the same decoder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.decoding.decoder import Message, Sampling, TransformersDecoder
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.baselines import rank_sentences, select, truncate
from ctx_compress_rag.evaluation.plots import Curve, plot_scores
from ctx_compress_rag.marking.mark import mark, size
from ctx_compress_rag.metrics import (
    Interval,
    contains_answer,
    declined,
    exact_match,
    standard_error,
    teacher_normalized,
    token_f1,
)
from ctx_compress_rag.ratios import check_window
from ctx_compress_rag.stores import SoftContextStore
from ctx_compress_rag.text.prompts import PASSAGE_SEPARATOR, messages

RATIOS = (4, 8, 16, 32, 64, 128)
FULL, NONE, SOFT, TRUNCATED, EXTRACTED = "full text", "no context", "soft context", "truncation", "extraction"

KEPT = {"full text": 1.0, "no context": 0.0}
KEPT_LABEL = "teacher-normalised F1"

ANSWER_TOKENS = 32
"""The longest answer where neither caller nor bundle says it."""
_AT_ONCE = 64  # questions: the slots that close reading makes for a question must stay until they are read
_SKIMMED = _AT_ONCE * 1024


@dataclass(frozen=True)
class Question:
    """A question with the passages given for it; without accepted answers, if they do not say."""

    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Score:
    """One system at one ratio.

    Attributes:
        system: what the decoder was given.
        ratio: source tokens per slot, None where there is none.
        exact_match, f1, contains: means over the questions that have an answer, 0 to 1.
        exact_match_error, f1_error: standard errors of `exact_match` and `f1`.
        normalized: teacher-normalised F1 with its 95 % bootstrap interval.
        prompt_tokens: mean length of the prompt, a slot counting as one.
        declined: share of the questions without an answer that were declined; None where there are none.
        declined_error: its standard error.
        wrongly_declined: share of the questions with an answer that were declined.
    """

    system: str
    ratio: int | None
    exact_match: float
    exact_match_error: float
    f1: float
    f1_error: float
    contains: float
    normalized: Interval | None
    prompt_tokens: float
    declined: float | None
    declined_error: float | None
    wrongly_declined: float


def questions_of(examples: Sequence[Example], limit: int | None = None) -> list[Question]:
    """One question per turn, the first of each example first, so that a limit spreads over examples."""
    turns = max(len(e.turns) for e in examples)
    questions = [
        Question(e.passages, e.turns[i].question, e.turns[i].answers)
        for i in range(turns)
        for e in examples
        if i < len(e.turns)
    ]
    return questions[:limit]


@dataclass(frozen=True)
class Answers:
    """What one system answered at one ratio.

    Attributes:
        texts: an answer for each question.
        prompt_tokens: mean length of the prompts, a slot counting as one.
        stored_bytes: mean size of a passage's slots as they are stored; None where nothing is stored.
    """

    texts: list[str]
    prompt_tokens: float
    stored_bytes: float | None


SystemAnswers = dict[tuple[str, int | None], Answers]
"""Answers by system and ratio."""


def evaluate(
    bundle: Bundle,
    questions: Sequence[Question],
    ratios: Sequence[int] = RATIOS,
    *,
    encoder: Any | None = None,
    codec: str | None = None,
    template: str | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> list[Score]:
    """Answer every question from full text, from nothing, and from its context made shorter in each way.

    Soft contexts take the way they take in use: through a store, its codec, markers and the splice.
    Truncation and extraction get, for each question, as many tokens as the soft context has slots, and as
    close reading (RAM) keeps text beside them.

    Args:
        bundle: what is scored; its decoder reads all baselines, too.
        questions: questions with their passages.
        ratios: multiples of the bundle's base ratio; for RAM, 2 or more.
        encoder: a sentence-transformers model for extraction; None leaves extraction out.
        codec: how slots are stored; None takes the store's default.
        template: the prompt, see `text.prompts`; None takes the bundle's.
        max_new_tokens: longest answer; None takes the bundle's, or 32.
        batch_size: questions per forward pass.
        progress: show a progress bar.
    """
    systems = (FULL, NONE, SOFT, TRUNCATED) if encoder is None else (FULL, NONE, SOFT, TRUNCATED, EXTRACTED)
    answers = answer(
        bundle,
        questions,
        ratios,
        systems,
        encoder=encoder,
        codec=codec,
        template=template,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        progress=progress,
    )
    return scores_of(questions, answers)


def check_ratios(bundle: Bundle, ratios: Sequence[int]) -> None:
    """Refuse ratios that a bundle's slots cannot be made at.

    Raises:
        RatioError: the first that cannot.
    """
    config = bundle.config
    if bundle.compressor.nestable or bundle.compressor.question_aware:
        config.method.check_ratios(config.base_ratio, ratios)
    else:  # each ratio is compressed apart
        for ratio in ratios:
            check_window(ratio, config.max_tokens)


def answer(
    bundle: Bundle,
    questions: Sequence[Question],
    ratios: Sequence[int],
    systems: Sequence[str],
    *,
    encoder: Any | None = None,
    codec: str | None = None,
    template: str | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> SystemAnswers:
    """Answer every question with each of `systems`: FULL, NONE, SOFT, TRUNCATED, EXTRACTED.

    The other arguments are those of `evaluate`.

    Raises:
        ConfigError: extraction without an encoder.
        RatioError: a ratio cannot be made.
    """
    check_ratios(bundle, ratios)
    if EXTRACTED in systems and encoder is None:
        raise ConfigError("extraction needs a sentence encoder: give one, or leave it out")
    template = template or bundle.config.asked_by
    max_new_tokens = max_new_tokens or bundle.config.answer_tokens or ANSWER_TOKENS
    answers: SystemAnswers = {}
    # One store serves all ratios of a nestable method, and of one that decides when it is asked; of another
    # each ratio needs its own.
    shared = bundle.compressor.nestable or bundle.compressor.question_aware
    for group in [list(ratios)] if shared else [[ratio] for ratio in ratios]:
        base = None if shared else group[0]
        left = [system for system in systems if (system, None) not in answers]  # full text and nothing: once
        with (
            tempfile.TemporaryDirectory() as folder,
            SoftContextStore(folder, bundle, codec=codec, ratio=base, skimmed_slots=_SKIMMED) as store,
        ):
            decoder = TransformersDecoder(bundle, store, batch_size=batch_size)
            answers |= _answers(decoder, store, questions, group, left, encoder, template, max_new_tokens, progress)
    return answers


def _answers(
    decoder: TransformersDecoder,
    store: SoftContextStore,
    questions: Sequence[Question],
    ratios: Sequence[int],
    systems: Sequence[str],
    encoder: Any | None,
    template: str,
    max_new_tokens: int,
    progress: bool,
) -> SystemAnswers:
    """The answers of `systems`, from slots at the store's ratios."""
    store.ensure(list(dict.fromkeys(p for q in questions for p in q.passages)))
    tokenizer = decoder.bundle.tokenizer
    ranked = {q: rank_sentences(q.passages, q.question, encoder) for q in questions} if encoder is not None else {}

    def soft(q: Question, ratio: int) -> list[str]:
        return mark(store, q.passages, question=q.question, **size(store.bundle, ratio))

    @cache
    def budget(q: Question, ratio: int) -> int:
        """Places that the soft context takes in the prompt: slots, and tokens of what close reading keeps."""
        return sum(decoder.count_tokens(text) for text in soft(q, ratio))

    def given(system: str, ratio: int | None, q: Question) -> list[str]:
        if ratio is None:
            return list(q.passages) if system == FULL else []
        if system == SOFT:
            return soft(q, ratio)
        if system == TRUNCATED:
            return truncate(q.passages, tokenizer, budget(q, ratio))
        return select(ranked[q], len(q.passages), tokenizer, budget(q, ratio))

    wanted: list[tuple[str, int | None]] = [(system, None) for system in (FULL, NONE) if system in systems]
    wanted += [(system, ratio) for ratio in ratios for system in (SOFT, TRUNCATED, EXTRACTED) if system in systems]
    answers: SystemAnswers = {}
    for system, ratio in tqdm(wanted, desc="answering", unit="system", disable=not progress):
        made = []
        for start in range(0, len(questions), _AT_ONCE):
            asked = questions[start : start + _AT_ONCE]
            prompts = [prompt_of(template, given(system, ratio, q), q.question) for q in asked]
            made += decoder.generate(prompts, Sampling(max_new_tokens=max_new_tokens))
        answers[system, ratio] = Answers(
            [g.text.strip() for g in made],
            float(np.mean([g.prompt_tokens for g in made])),
            store.info().payload_bytes / len(store) if system == SOFT else None,
        )
    return answers


def prompt_of(template: str, texts: Sequence[str], question: str) -> list[Message]:
    """The chat that asks a question about texts, blank ones left out."""
    context = PASSAGE_SEPARATOR.join(text for text in texts if text)
    return [dict(message) for message in messages(template, context, question)]


def each(
    metric: Callable[[str, Sequence[str]], float], given: Sequence[str], questions: Sequence[Question]
) -> list[float]:
    """A metric's score of each question's answer."""
    return [metric(text, q.answers) for text, q in zip(given, questions, strict=True)]


def scores_of(questions: Sequence[Question], answers: SystemAnswers) -> list[Score]:
    """The score of each system's answers; full text's and those without context are among them."""
    asked = [q for q in questions if q.answers]
    said = {
        key: [t for t, q in zip(given.texts, questions, strict=True) if q.answers] for key, given in answers.items()
    }
    rest = {
        key: [declined(t) for t, q in zip(given.texts, questions, strict=True) if not q.answers]
        for key, given in answers.items()
    }
    f1 = {key: each(token_f1, texts, asked) for key, texts in said.items()}
    exact = {key: each(exact_match, texts, asked) for key, texts in said.items()}
    full, none = f1[FULL, None], f1[NONE, None]
    return [
        Score(
            system=key[0],
            ratio=key[1],
            exact_match=float(np.mean(exact[key])),
            exact_match_error=standard_error(exact[key]),
            f1=float(np.mean(f1[key])),
            f1_error=standard_error(f1[key]),
            contains=float(np.mean(each(contains_answer, said[key], asked))),
            normalized=teacher_normalized(f1[key], none, full) if key[0] not in (FULL, NONE) else None,
            prompt_tokens=given.prompt_tokens,
            declined=float(np.mean(rest[key])) if rest[key] else None,
            declined_error=standard_error(rest[key]) if len(rest[key]) > 1 else None,
            wrongly_declined=float(np.mean([declined(text) for text in said[key]])),
        )
        for key, given in answers.items()
    ]


def table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table, ± one standard error; with questions that have no answer, who declined them."""
    rows = []
    for s in scores:
        row = {
            "context": s.system,
            "ratio": report.times(s.ratio),
            "EM": report.with_error(s.exact_match, s.exact_match_error),
            "F1": report.with_error(s.f1, s.f1_error),
            "teacher-normalised F1": report.interval(s.normalized),
            "prompt tokens": f"{s.prompt_tokens:.0f}",
        }
        if s.declined is not None:
            row["declined, rightly"] = report.with_error(s.declined, s.declined_error)
            row["wrongly"] = f"{s.wrongly_declined:.3f}"
        rows.append(row)
    return report.table(rows)


def save(scores: Sequence[Score], folder: str | Path, about: dict[str, Any]) -> None:
    """Write scores.json, scores.md, scores.png and normalised.png; `about` says how they were made."""
    folder = report.write(folder, "scores", table(scores), {**about, "scores": [asdict(s) for s in scores]})
    by_system = {system: [s for s in scores if s.system == system] for system in (SOFT, EXTRACTED, TRUNCATED)}
    curves = [
        report.curve(system, [(s.ratio or 0, s.f1, 1.96 * s.f1_error) for s in rows])
        for system, rows in by_system.items()
        if rows
    ]
    levels = {s.system: s.f1 for s in scores if s.ratio is None}
    title = f"{about.get('bundle', '')}: answer F1 on {about.get('data', '')}"
    plot_scores(folder / "scores.png", curves, levels, title=title)
    if kept := normalised_curves(scores):
        plot_scores(folder / "normalised.png", kept, KEPT, ylabel=KEPT_LABEL, title=title)


def normalised_curves(scores: Sequence[Score]) -> list[Curve]:
    """Teacher-normalised F1 against ratio, with its intervals; none where full text gains nothing."""
    curves = []
    for system in (SOFT, EXTRACTED, TRUNCATED):
        kept = [(s.ratio or 0, s.normalized) for s in scores if s.system == system and s.normalized is not None]
        if kept:
            ratios, shares = [ratio for ratio, _ in kept], [share for _, share in kept]
            values, low, high = ([getattr(s, end) for s in shares] for end in ("value", "low", "high"))
            curves.append(Curve(system, ratios, values, low, high))
    return curves
