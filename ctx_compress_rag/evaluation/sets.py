"""Score a bundle on one or more sets of questions, each separately, for `ctx-compress eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, Unpack

from benchmarks.scoring.judge import Judge
from benchmarks.scoring.perplexity import perplexity_table, reconstruction_perplexity
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import read_jsonl, spread
from ctx_compress_rag.data.mixing import accompanied
from ctx_compress_rag.decoding.decoder import TransformersDecoder
from ctx_compress_rag.errors import ConfigError, DataError
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.answering import Asking, check_ratios, conditions, prompt_of
from ctx_compress_rag.evaluation.harness import (
    KEPT,
    KEPT_LABEL,
    Score,
    evaluate,
    normalized_curves,
    save,
    table,
)
from ctx_compress_rag.evaluation.plots import plot_panels
from ctx_compress_rag.evaluation.questions import Question, questions_of
from ctx_compress_rag.store.codec import check_codec

_ANSWERS = "answers.jsonl"


def question_sets(files: Sequence[str], limit: int, passages: int = 1) -> dict[str, list[Question]]:
    """The questions of JSONL files by the file's name without its suffix, at most `limit` of each, evenly spread.

    If a question has fewer than `passages` passages, others of its file are mixed in.

    Raises:
        DataError: two files have the same name.
    """
    sets: dict[str, list[Question]] = {}
    for file in files:
        name = Path(file).name.split(".")[0]
        if name in sets:
            raise DataError(f"two files are named {name!r}: their scores would go into the same folder")
        examples = accompanied(read_jsonl(file, unanswerable=True), passages)
        sets[name] = spread(questions_of(examples), limit)
    return sets


def evaluate_sets(
    bundle: Bundle,
    sets: Mapping[str, Sequence[Question]],
    ratios: Sequence[int],
    output: str | Path,
    *,
    judge: Judge | None = None,
    perplexity: bool = False,
    in_domain: Sequence[str] = (),
    card: bool = False,
    **asking: Unpack[Asking],
) -> str:
    """Score each set; write answers, scores and plots, and for several sets also a joint table and plot.

    If it is run again after an interruption, it continues from the written answers. Questions whose full text does not
    fit into the decoder's window are left out, and counted. Ratios and set sizes are checked before any answering.

    Args:
        bundle: the bundle to score.
        sets: questions by the name of their set.
        ratios: see `evaluate`.
        output: a folder; each of several sets gets a folder in it.
        judge: see `evaluate`.
        perplexity: also score how well passages are reconstructed from their slots.
        in_domain: names of the sets like the bundle's training data; they and the others get means of their own, too.
        card: also write the scores into the bundle's model card.
        asking: how to ask.

    Returns: the tables.

    Raises:
        ConfigError: a name in `in_domain` is not a set's, there is no such codec, or several sets are to go into the
            folder of one.
        DataError: a set has fewer than two questions with an answer that fit.
        RatioError: a ratio cannot be made.
    """
    check_ratios(bundle, ratios)
    if (codec := asking.get("codec")) is not None:
        check_codec(codec)
    if unknown := sorted(set(in_domain) - set(sets)):
        raise ConfigError(f"in_domain names {unknown[0]!r}, which is not one of the sets: {', '.join(sets)}")
    if len(sets) > 1 and (single := Path(output, _ANSWERS)).exists():
        raise ConfigError(f"{single} is of one set, evaluated into this folder before: give another folder")
    template, longest = asking.get("template"), asking.get("max_new_tokens")
    fit = {name: fitting(bundle, asked, template, longest) for name, asked in sets.items()}
    for name, questions in fit.items():
        answered = sum(bool(q.answers) for q in questions)
        if answered < 2:
            raise DataError(
                f"{name}: {answered} questions have an answer and fit into the decoder's window: give 2 or more, since "
                "fewer have no standard error"
            )
    texts = []
    results: dict[str, list[Score]] = {}
    for name, questions in fit.items():
        about: dict[str, Any] = {
            "bundle": bundle.config.name,
            **conditions(bundle, questions, **asking),
            "data": name,
            "questions": len(questions),
            "too_long": len(sets[name]) - len(questions),
        }
        place = Path(output, name) if len(sets) > 1 else Path(output)
        if judge is not None:
            about["judge"] = type(judge).__name__
        perplexities = []
        if perplexity:
            passages = list(dict.fromkeys(passage for question in questions for passage in question.passages))
            perplexities = reconstruction_perplexity(bundle, passages, ratios)
            about["reconstruction_perplexity"] = [asdict(each) for each in perplexities]
        log = place / _ANSWERS
        scores = results[name] = evaluate(bundle, questions, ratios, judge=judge, log=log, **asking)
        save(scores, place, about)
        if card:
            _add_to_card(bundle, name, scores, len(questions))
        texts.append(table(scores))
        if perplexities:
            texts.append(perplexity_table(perplexities))
        left_out = f" ({about['too_long']} are longer than the window)" if about["too_long"] else ""
        texts.append(f"{len(questions)} questions from {name}{left_out}")
    if len(results) > 1:
        texts.append(f"Means of the {len(results)} sets:\n\n{macro_table(results, in_domain)}")
        save_together(results, output, texts[-1], f"{bundle.config.name}: the share of full text's gain that is kept")
    return "\n\n".join(texts)


def _add_to_card(bundle: Bundle, name: str, scores: Sequence[Score], questions: int) -> None:
    rows = [
        {"context": s.system, "ratio": s.ratio, "f1": round(s.f1, 4), "error": round(s.f1_error, 4)} for s in scores
    ]
    bundle.report.setdefault("scores", {})[name] = {"questions": questions, "f1": rows}
    bundle.save_report()


def macro_table(results: Mapping[str, Sequence[Score]], in_domain: Sequence[str] = ()) -> str:
    """Means over sets, each set counting once; with `in_domain`, also over those sets and over the others.

    The gap between these two is of teacher-normalized F1 (Simple Context Compression, appendix B): a gap of F1 would
    mostly be the gap that full text has.
    """
    domains = {"in domain": [name for name in results if name in in_domain]}
    domains["out of it"] = [name for name in results if name not in in_domain]
    rows = []
    for index, first in enumerate(next(iter(results.values()))):
        each = {name: scores[index] for name, scores in results.items()}
        row = {"context": first.system, "ratio": report.times(first.ratio)}
        for column, key in (("EM", "exact_match"), ("F1", "f1"), ("contains", "contains")):
            row[column] = f"{mean(getattr(score, key) for score in each.values()):.3f}"
        kept = {name: score.normalized.value for name, score in each.items() if score.normalized is not None}
        if len(kept) == len(each):
            row["teacher-normalized F1"] = f"{mean(kept.values()):.3f}"
        judged = [score.judged for score in each.values() if score.judged is not None]
        if len(judged) == len(each):
            row["judged right"] = f"{mean(judged):.3f}"
        if all(domains.values()):
            for where, names in domains.items():
                row[f"EM {where}"] = f"{mean(each[name].exact_match for name in names):.3f}"
                row[f"F1 {where}"] = f"{mean(each[name].f1 for name in names):.3f}"
            if len(kept) == len(each):
                own, others = (mean(kept[name] for name in names) for names in domains.values())
                row["teacher-normalized gap"] = f"{own - others:+.3f}"
        rows.append(row)
    return report.table(rows)


def save_together(results: Mapping[str, Sequence[Score]], folder: str | Path, means: str, title: str) -> None:
    """Write the tables of several sets into one scores.md, and their teacher-normalized curves into normalized.png."""
    text = "\n\n".join([*(f"### {name}\n\n{table(scores)}" for name, scores in results.items()), means])
    folder = report.write(folder, "scores", text)
    panels = {name: curves for name, scores in results.items() if (curves := normalized_curves(scores))}
    if panels:
        ticks = sorted({int(ratio) for curves in panels.values() for curve in curves for ratio in curve.ratios})
        plot_panels(folder / "normalized.png", panels, [], KEPT, ticks, ylabel=KEPT_LABEL, title=title)


def fitting(
    bundle: Bundle, questions: Sequence[Question], template: str | None = None, max_new_tokens: int | None = None
) -> list[Question]:
    """The questions whose full text fits into the decoder's window with an answer."""
    decoder = TransformersDecoder(bundle)
    window = bundle.backbone.window
    template = template or bundle.config.template
    max_new_tokens = max_new_tokens or bundle.config.answer_tokens

    def length(q: Question) -> int:
        return decoder.count_chat_tokens(prompt_of(template, q.passages, q.question))

    return [q for q in questions if window is None or length(q) + max_new_tokens <= window]
