"""Score a bundle and its baselines on the same questions with the same decoder."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.evaluation import answering, report
from ctx_compress_rag.evaluation.answering import EXTRACTED, FULL, NONE, SEVERAL, SOFT, TRUNCATED, EvaluationOptions
from ctx_compress_rag.evaluation.plots import ScoreCurve, plot_scores
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.evaluation.statistics import ConfidenceInterval, standard_error, teacher_normalized
from ctx_compress_rag.text.answers import contains_answer, declined, exact_match, token_f1


@dataclass(frozen=True)
class SystemScore:
    """Scores of one system (a way to make the context) at one ratio, as means from 0 to 1 over answerable questions."""

    system: str  # what the decoder was given
    ratio: int | None  # source tokens per slot, None if there is none
    exact_match: float
    exact_match_error: float
    f1: float
    f1_error: float
    contains: float  # share of answers that contain an accepted answer
    normalized: ConfidenceInterval | None  # teacher-normalized F1 with its 95 % bootstrap interval
    prompt_tokens: float  # a slot counts as one
    declined: float | None  # of the questions without an answer; None if there are none
    declined_error: float | None
    wrongly_declined: float  # of the questions with an answer


def evaluate(
    bundle: Bundle,
    questions: Sequence[Question],
    ratios: Sequence[int] | None = None,
    **asking: Unpack[EvaluationOptions],
) -> list[SystemScore]:
    """Return the scores of answers from full text, without context, and from the context shortened in each way.

    Soft contexts take the path that they take in an application, through a store, its codec, markers and the splice.
    Other shortened contexts get prompts of as many tokens for each question, and are read by the same decoder. The
    default ratios are those that the bundle was trained for.
    """
    ratios, systems = ratios or bundle.config.ratios, compared_systems(bundle, questions, **asking)
    return score_answers(questions, answering.answer_questions(bundle, questions, ratios, systems, **asking))


def compared_systems(bundle: Bundle, questions: Sequence[Question], **asking: Unpack[EvaluationOptions]) -> list[str]:
    """Return the systems (ways to make the context) that `evaluate` compares, in the order of the table."""
    several = any(len(q.passages) > 1 for q in questions) and not bundle.compressor.needs_question
    near = [EXTRACTED, *(SEVERAL if several else ())] if asking.get("sentences", True) else []
    return [FULL, NONE, SOFT, TRUNCATED, *near, *asking.get("shorteners", ())]


def score_each_answer(
    metric: Callable[[str, Sequence[str]], float], given: Sequence[str], questions: Sequence[Question]
) -> list[float]:
    """Return a metric's score of the answer to each question."""
    return [metric(text, q.answers) for text, q in zip(given, questions, strict=True)]


def score_answers(questions: Sequence[Question], answers: answering.SystemAnswers) -> list[SystemScore]:
    """Return the scores of each system's answers, which must include those from full text and without context."""
    asked = [q for q in questions if q.answers]
    said = {
        key: [t for t, q in zip(given.texts, questions, strict=True) if q.answers] for key, given in answers.items()
    }
    full, none = (score_each_answer(token_f1, said[system, None], asked) for system in (FULL, NONE))
    scores = []
    for key, texts in said.items():
        f1, exact = score_each_answer(token_f1, texts, asked), score_each_answer(exact_match, texts, asked)
        rest = [declined(t) for t, q in zip(answers[key].texts, questions, strict=True) if not q.answers]
        scores.append(
            SystemScore(
                system=key[0],
                ratio=key[1],
                exact_match=float(np.mean(exact)),
                exact_match_error=standard_error(exact),
                f1=float(np.mean(f1)),
                f1_error=standard_error(f1),
                contains=float(np.mean(score_each_answer(contains_answer, texts, asked))),
                normalized=teacher_normalized(f1, none, full) if key[0] not in (FULL, NONE) else None,
                prompt_tokens=float(np.mean(answers[key].prompt_tokens)),
                declined=float(np.mean(rest)) if rest else None,
                declined_error=standard_error(rest) if len(rest) > 1 else None,
                wrongly_declined=float(np.mean([declined(text) for text in texts])),
            )
        )
    return scores


def score_table(scores: Sequence[SystemScore]) -> str:
    """Return the scores as a Markdown table, ± one standard error, with columns for declined questions if any exist."""
    rows = []
    for s in scores:
        row = {
            "context": s.system,
            "ratio": report.ratio_text(s.ratio),
            "EM": report.mean_with_error(s.exact_match, s.exact_match_error),
            "F1": report.mean_with_error(s.f1, s.f1_error),
            "contains": f"{s.contains:.3f}",
            "teacher-normalized F1": report.interval_text(s.normalized),
            "prompt tokens": f"{s.prompt_tokens:.0f}",
        }
        if s.declined is not None:
            row["declined, rightly"] = report.mean_with_error(s.declined, s.declined_error)
            row["wrongly"] = f"{s.wrongly_declined:.3f}"
        rows.append(row)
    return report.markdown_table(rows)


def save_scores(scores: Sequence[SystemScore], text: str, folder: str | Path, about: dict[str, Any]) -> None:
    """Write scores.json, scores.md with `text`, and scores.png; `about` says how the scores were made."""
    folder = report.write_report(folder, "scores", text, {**about, "scores": [asdict(s) for s in scores]})
    curves = [
        ScoreCurve(system, [(s.ratio, s.f1, 1.96 * s.f1_error) for s in scores if s.system == system and s.ratio])
        for system in dict.fromkeys(s.system for s in scores if s.ratio)
    ]
    levels = {s.system: s.f1 for s in scores if s.ratio is None}
    title = f"{about.get('bundle', '')}: answer F1 on {about.get('data', '')}"
    plot_scores(folder / "scores.png", curves, levels, title)
