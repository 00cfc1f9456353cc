"""Score a bundle and its baselines on the same questions with the same decoder, or on sets of questions from files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import read_jsonl, spread_examples
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.evaluation import answering, report
from ctx_compress_rag.evaluation.answering import EXTRACTED, FULL, NONE, SEVERAL, SOFT, TRUNCATED, EvaluationOptions
from ctx_compress_rag.evaluation.questions import NeighborPassages, Question, questions_of
from ctx_compress_rag.evaluation.report import (
    ConfidenceInterval,
    ScoreCurve,
    plot_scores,
    standard_error,
    teacher_normalized,
)
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
    several = SEVERAL if answering.shows_several(bundle, questions) else ()
    near = [EXTRACTED, *several] if asking.get("sentences", True) else []
    return [FULL, NONE, SOFT, TRUNCATED, *near]


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
    plot_scores(folder / "scores.png", curves, levels, f"{about['bundle']}: answer F1 on {about['data']}")


@dataclass(frozen=True)
class SetScores:
    """The result for a set."""

    scores: list[SystemScore]
    text: str  # the table as Markdown, and what was scored
    questions: list[Question]  # those that were asked
    answers: answering.SystemAnswers
    folder: Path  # of the written files


def question_sets(files: Sequence[str], limit: int, passages: int = 1) -> dict[str, list[Question]]:
    """Return the questions of JSONL files, by file name without suffix, at most `limit` of each file, evenly spread.

    A question with too few passages gets the nearest ones of its file, up to `passages`. Equal names raise DataError.
    """
    sets: dict[str, list[Question]] = {}
    for file in files:
        name = Path(file).name.split(".")[0]
        if name in sets:
            raise DataError(f"two files are named {name!r}, and their scores would go into one folder: rename one")
        examples = read_jsonl(file, unanswerable=True)
        sets[name] = spread_examples(questions_of(examples), limit)
        if any(len(q.passages) < passages for q in sets[name]):
            neighbors = NeighborPassages([passage for e in examples for passage in e.passages])
            sets[name] = [neighbors.among(q, passages) for q in sets[name]]
    return sets


def evaluate_sets(
    bundle: Bundle,
    sets: Mapping[str, Sequence[Question]],
    ratios: Sequence[int] | None,
    output: str | Path,
    **asking: Unpack[answering.EvaluationOptions],
) -> dict[str, SetScores]:
    """Score each set as `evaluate` does; write answers, scores and plots, and return the results by set.

    A call after an interruption continues from the written answers. Questions whose full text does not fit into the
    decoder's window are left out, and counted. Each of several sets gets a folder in `output`. `ratios` None takes
    the bundle's. DataError is raised if fewer than two questions with an answer are left in a set.
    """
    ratios = ratios or bundle.config.ratios
    untrained = [ratio for ratio in ratios if ratio not in bundle.config.ratios]
    fit = {name: fitting_questions(bundle, asked, asking.get("max_tokens")) for name, asked in sets.items()}
    for name, questions in fit.items():
        answered = sum(bool(q.answers) for q in questions)
        if answered < 2:
            raise DataError(
                f"{name}: {answered} questions have an answer and fit into the decoder's window: give 2 or more, since "
                "fewer have no standard error"
            )
    results: dict[str, SetScores] = {}
    for name, questions in fit.items():
        too_long = len(sets[name]) - len(questions)
        folder = Path(output, name) if len(sets) > 1 else Path(output)
        systems = compared_systems(bundle, questions, **asking)
        answers = answering.answer_questions(bundle, questions, ratios, systems, log=folder / "answers.jsonl", **asking)
        scores = score_answers(questions, answers)
        about = {"bundle": bundle.config.name, "data": name, "questions": len(questions), "too_long": too_long}
        said = f"{len(questions)} questions from {name}"
        said += f" ({too_long} are longer than the window)" if too_long else ""
        said += f"; not trained for {', '.join(map(report.ratio_text, untrained))}" if untrained else ""
        text = f"{score_table(scores)}\n\n{said}"
        about |= answering.evaluation_conditions(bundle, questions, **asking)
        save_scores(scores, text, folder, about)
        results[name] = SetScores(scores, text, questions, answers, folder)
    return results


def fitting_questions(bundle: Bundle, questions: Sequence[Question], max_tokens: int | None = None) -> list[Question]:
    """Return the questions whose full text fits into the decoder's window with an answer."""
    window, count = bundle.backbone.window, Decoder(bundle).preparer.count_chat_tokens
    if window is None:
        return list(questions)
    most, template = window - (max_tokens or bundle.config.answer_tokens), bundle.config.template
    return [q for q in questions if count(answering.question_chat(template, q.passages, q.question)) <= most]
