"""Score a bundle on one or more sets of questions, each separately, for `ctx-compress eval`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import read_jsonl, spread_examples
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.evaluation import answering, report
from ctx_compress_rag.evaluation.harness import SystemScore, compared_systems, save_scores, score_answers, score_table
from ctx_compress_rag.evaluation.questions import NeighborPassages, Question, questions_of

_ANSWERS = "answers.jsonl"


Extra: TypeAlias = Callable[[Bundle, Sequence[Question], answering.SystemAnswers, Path], tuple[str, Any]]
"""A function that adds a table, such as a judge's verdicts: (a bundle, a set's questions, systems' answers, the set's
folder) -> the table as Markdown, and JSON values for scores.json."""


@dataclass(frozen=True)
class SetScores:
    """The result for a set, which is the scores, all tables as Markdown, and how many questions were asked."""

    scores: list[SystemScore]
    text: str
    questions: int


def question_sets(files: Sequence[str], limit: int, passages: int = 1) -> dict[str, list[Question]]:
    """Return the questions of JSONL files, by file name without suffix, at most `limit` of each file, evenly spread.

    A question with too few passages gets the nearest ones of its file, up to `passages`. Equal names raise DataError.
    """
    sets: dict[str, list[Question]] = {}
    for file in files:
        name = Path(file).name.split(".")[0]
        if name in sets:
            raise DataError(f"two files are named {name!r}: their scores would go into the same folder")
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
    *,
    extras: Mapping[str, Extra] | None = None,
    **asking: Unpack[answering.EvaluationOptions],
) -> dict[str, SetScores]:
    """Score each set as `evaluate` does; write answers, scores and plots, and return the results by set.

    A call after an interruption continues from the written answers. Questions whose full text does not fit into the
    decoder's window are left out, and counted. Each of several sets gets a folder in `output`. Each of `extras` adds a
    table, and a value in each set's scores.json under the same key. `ratios` None takes the bundle's. DataError is
    raised if fewer than two questions with an answer are left in a set.
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
        answers = answering.answer_questions(bundle, questions, ratios, systems, log=folder / _ANSWERS, **asking)
        scores = score_answers(questions, answers)
        about = {"bundle": bundle.config.name, "data": name, "questions": len(questions), "too_long": too_long}
        tables = [score_table(scores)]
        for key, extra in (extras or {}).items():
            text, about[key] = extra(bundle, questions, answers, folder)
            tables.append(text)
        said = f"{len(questions)} questions from {name}"
        said += f" ({too_long} are longer than the window)" if too_long else ""
        said += f"; not trained for {', '.join(map(report.ratio_text, untrained))}" if untrained else ""
        text = "\n\n".join([*tables, said])
        about |= answering.evaluation_conditions(bundle, questions, **asking)
        save_scores(scores, text, folder, about)
        results[name] = SetScores(scores, text, len(questions))
    return results


def fitting_questions(bundle: Bundle, questions: Sequence[Question], max_tokens: int | None = None) -> list[Question]:
    """Return the questions whose full text fits into the decoder's window with an answer."""
    window, count = bundle.backbone.window, Decoder(bundle).preparer.count_chat_tokens
    if window is None:
        return list(questions)
    most, template = window - (max_tokens or bundle.config.answer_tokens), bundle.config.template
    return [q for q in questions if count(answering.question_chat(template, q.passages, q.question)) <= most]
