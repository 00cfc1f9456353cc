"""Score a bundle and its baselines on the same questions with the same decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from benchmarks.scoring.judge import Judge, judge_answers
from benchmarks.timing.cost import Cost, cost_table
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.answering import (
    BUDGETED,
    EXTRACTED,
    FULL,
    LINGUA,
    NONE,
    RATIOS,
    SHORTENED,
    SOFT,
    TRUNCATED,
    Asking,
    Key,
    SystemAnswers,
    answer,
)
from ctx_compress_rag.evaluation.plots import Curve, plot_scores
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.text.answers import (
    Interval,
    contains_answer,
    declined,
    exact_match,
    standard_error,
    teacher_normalized,
    token_f1,
)

KEPT = {FULL: 1.0, NONE: 0.0}
KEPT_LABEL = "teacher-normalized F1"


@dataclass(frozen=True)
class Score:
    """One system at one ratio.

    Attributes:
        system: what the decoder was given.
        ratio: source tokens per slot, None if there is none.
        exact_match, f1, contains: means over the questions that have an answer, 0 to 1.
        exact_match_error, f1_error: standard errors of `exact_match` and `f1`.
        normalized: teacher-normalized F1 with its 95 % bootstrap interval.
        prompt_tokens: mean length of the prompt, a slot counting as one.
        declined: share of the questions without an answer that were declined; None if there are none.
        declined_error: standard error of `declined`.
        wrongly_declined: share of the questions with an answer that were declined.
        cases: share of right answers, and number of questions, by whether the answers without context (first letter)
            and from full text (second) are right: "FT" holds the questions that only full text answers (ArcAligner,
            figure 6). Right means judged right, questions with an unreadable verdict left out; without a judge, it
            means containing an accepted answer.
        judged: share of the questions with an answer that were answered right, among the judge's readable verdicts;
            None if there are none.
        judged_error: standard error of `judged`.
        unread: how many verdicts could not be read; None without a judge.
        cost: the cost of a question; None if it was not measured.
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
    cases: dict[str, tuple[float, int]] = field(default_factory=dict)
    judged: float | None = None
    judged_error: float | None = None
    unread: int | None = None
    cost: Cost | None = None


def evaluate(
    bundle: Bundle,
    questions: Sequence[Question],
    ratios: Sequence[int] = RATIOS,
    *,
    judge: Judge | None = None,
    log: str | Path | None = None,
    progress: bool = True,
    **asking: Unpack[Asking],
) -> list[Score]:
    """Score answers from full text, without context, and from the context shortened in each way.

    Soft contexts take the path that they take in an application: a store, its codec, markers and the splice.
    Truncation, extraction and LLMLingua-2 get as many tokens for each question as the soft context takes: its slots,
    and the text that close reading (RAM) keeps. So does a token budget, which reads the passages most similar to
    the question at finer ratios; it is scored if prompts have several passages and slots can be merged.

    Args:
        bundle: the bundle to score; its decoder also reads the baselines.
        questions: questions with their passages.
        ratios: multiples of the bundle's base ratio; for RAM, 2 or more.
        judge: a chat model that says whether each answer is right (see `judge_answers`); None leaves judging out.
        log: a JSONL file that keeps the answers; those that it already has, for the same questions asked in the same
            way, are reused. Give each `encoder` its own log. A judge's replies go into judged.jsonl in the same folder.
        progress: show a progress bar.
        asking: how to ask.
    """
    encoder, several = asking.get("encoder"), any(len(q.passages) > 1 for q in questions)
    optional = {
        BUDGETED: encoder is not None and several and bundle.compressor.nestable,
        EXTRACTED: encoder is not None,
        LINGUA: asking.get("lingua") is not None,
    }
    systems = [FULL, NONE, SOFT, TRUNCATED, *(system for system, there in optional.items() if there)]
    answers = answer(bundle, questions, ratios, systems, log=log, progress=progress, **asking)
    judged_log = None if log is None else Path(log).with_name("judged.jsonl")
    verdicts = None if judge is None else _verdicts(judge, questions, answers, judged_log, progress)
    return scores_of(questions, answers, verdicts)


def each(
    metric: Callable[[str, Sequence[str]], float], given: Sequence[str], questions: Sequence[Question]
) -> list[float]:
    """A metric's score of each question's answer."""
    return [metric(text, q.answers) for text, q in zip(given, questions, strict=True)]


def _verdicts(
    judge: Judge, questions: Sequence[Question], answers: SystemAnswers, log: Path | None, progress: bool
) -> dict[Key, list[bool | None]]:
    """The judge's verdicts on each system's answers to the questions that have an accepted answer."""
    asked = [
        (key, (q.question, q.answers, text))
        for key, given in answers.items()
        for q, text in zip(questions, given.texts, strict=True)
        if q.answers
    ]
    verdicts: dict[Key, list[bool | None]] = {key: [] for key in answers}
    found = judge_answers(judge, [one for _, one in asked], progress, log)
    for (key, _), each_found in zip(asked, found, strict=True):
        verdicts[key].append(each_found)
    return verdicts


def scores_of(
    questions: Sequence[Question], answers: SystemAnswers, verdicts: Mapping[Key, Sequence[bool | None]] | None = None
) -> list[Score]:
    """Score each system's answers, which must include those from full text and without context.

    Args:
        questions: what was asked.
        answers: what was answered.
        verdicts: a judge's, by system and ratio, on the questions that have an answer; None for a reply that could
            not be read.
    """
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
    contains = {key: each(contains_answer, texts, asked) for key, texts in said.items()}
    full, none = f1[FULL, None], f1[NONE, None]
    right = {key: [float(found) for found in given if found is not None] for key, given in (verdicts or {}).items()}
    return [
        Score(
            system=key[0],
            ratio=key[1],
            exact_match=float(np.mean(exact[key])),
            exact_match_error=standard_error(exact[key]),
            f1=float(np.mean(f1[key])),
            f1_error=standard_error(f1[key]),
            contains=float(np.mean(contains[key])),
            normalized=teacher_normalized(f1[key], none, full) if key[0] not in (FULL, NONE) else None,
            prompt_tokens=given.prompt_tokens,
            declined=float(np.mean(rest[key])) if rest[key] else None,
            declined_error=standard_error(rest[key]) if len(rest[key]) > 1 else None,
            wrongly_declined=float(np.mean([declined(text) for text in said[key]])),
            cases=_cases(verdicts or contains, key),
            judged=float(np.mean(right[key])) if right.get(key) else None,
            judged_error=standard_error(right[key]) if len(right.get(key, ())) > 1 else None,
            unread=len(asked) - len(right[key]) if key in right else None,
            cost=given.cost,
        )
        for key, given in answers.items()
    ]


def _cases(right: Mapping[Key, Sequence[float | None]], key: Key) -> dict[str, tuple[float, int]]:
    """`Score.cases` of a system; `right` says which answers are right, None if that is unknown."""
    by_case: dict[str, list[float]] = {"TT": [], "TF": [], "FT": [], "FF": []}
    for alone, read, own in zip(right[NONE, None], right[FULL, None], right[key], strict=True):
        if alone is not None and read is not None and own is not None:
            by_case["FT"[int(alone)] + "FT"[int(read)]].append(float(own))
    return {case: (float(np.mean(found)), len(found)) for case, found in by_case.items() if found}


def table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table, ± one standard error.

    Columns for declined questions and a judge's verdicts, and a second table for costs, appear if there are any.
    """
    rows = []
    for s in scores:
        row = {
            "context": s.system,
            "ratio": report.times(s.ratio),
            "EM": report.with_error(s.exact_match, s.exact_match_error),
            "F1": report.with_error(s.f1, s.f1_error),
            "contains": f"{s.contains:.3f}",
            "teacher-normalized F1": report.interval(s.normalized),
            "prompt tokens": f"{s.prompt_tokens:.0f}",
        }
        if s.declined is not None:
            row["declined, rightly"] = report.with_error(s.declined, s.declined_error)
            row["wrongly"] = f"{s.wrongly_declined:.3f}"
        if s.unread is not None:
            row["judged right"] = "" if s.judged is None else report.with_error(s.judged, s.judged_error)
            row["verdicts not read"] = str(s.unread)
        rows.append(row)
    costs = {(s.system, s.ratio): s.cost for s in scores if s.cost is not None}
    return "\n\n".join([report.table(rows), *([cost_table(costs)] if costs else [])])


def save(scores: Sequence[Score], folder: str | Path, about: dict[str, Any]) -> None:
    """Write scores.json, scores.md, scores.png and normalized.png; `about` says how they were made."""
    folder = report.write(folder, "scores", table(scores), {**about, "scores": [asdict(s) for s in scores]})
    by_system = {system: [s for s in scores if s.system == system] for system in SHORTENED}
    curves = [
        report.curve(system, [(s.ratio or 0, s.f1, 1.96 * s.f1_error) for s in rows])
        for system, rows in by_system.items()
        if rows
    ]
    levels = {s.system: s.f1 for s in scores if s.ratio is None}
    title = f"{about.get('bundle', '')}: answer F1 on {about.get('data', '')}"
    plot_scores(folder / "scores.png", curves, levels, title=title)
    if kept := normalized_curves(scores):
        plot_scores(folder / "normalized.png", kept, KEPT, ylabel=KEPT_LABEL, title=title)


def normalized_curves(scores: Sequence[Score]) -> list[Curve]:
    """Teacher-normalized F1 against ratio, with its intervals; no curve if full text gains nothing."""
    curves = []
    for system in SHORTENED:
        kept = [(s.ratio or 0, s.normalized) for s in scores if s.system == system and s.normalized is not None]
        if kept:
            ratios, shares = [ratio for ratio, _ in kept], [share for _, share in kept]
            values, low, high = ([getattr(s, end) for s in shares] for end in ("value", "low", "high"))
            curves.append(Curve(system, ratios, values, low, high))
    return curves
