"""Tables of the papers, beside those of `ctx-compress eval`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.answering import FULL, NONE, SystemAnswers
from ctx_compress_rag.evaluation.harness import SetScores, SystemScore
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.text.answers import contains_answer

Table: TypeAlias = Callable[[Bundle, Sequence[Question], SystemAnswers, Path], tuple[str, Any]]
"""Makes a table, such as a judge's verdicts: (a bundle, a set's questions, systems' answers, the set's folder) -> the
table as Markdown, and JSON values."""

_CASES = {"TT": "always", "TF": "only without context", "FT": "only from full text", "FF": "never"}


def add_table(bundle: Bundle, scored: SetScores, key: str, make: Table) -> SetScores:
    """The set's result with a table, also in its files; the values are in scores.json under `key`."""
    table, values = make(bundle, scored.questions, scored.answers, scored.folder)
    text = f"{scored.text}\n\n{table}"
    record = json.loads((scored.folder / "scores.json").read_text(encoding="utf-8"))
    report.write_report(scored.folder, "scores", text, {**record, key: values})
    return replace(scored, text=text)


def case_table(bundle: Bundle, questions: Sequence[Question], answers: SystemAnswers, folder: Path) -> tuple[str, Any]:
    """Shares of right answers by when the decoder is right without compression (ArcAligner, figure 6).

    An answer is right if it contains an accepted one.
    """
    right = {
        key: [contains_answer(t, q.answers) for t, q in zip(given.texts, questions, strict=True) if q.answers]
        for key, given in answers.items()
    }
    cases = ["FT"[int(a)] + "FT"[int(b)] for a, b in zip(right[NONE, None], right[FULL, None], strict=True)]
    rows = []
    for (system, ratio), own in right.items():
        row = {"context": system, "ratio": report.ratio_text(ratio)}
        for case, name in _CASES.items():
            found = [value for value, its in zip(own, cases, strict=True) if its == case]
            row[f"right {name} ({len(found)})"] = f"{mean(found):.3f}" if found else ""
        rows.append(row)
    return report.markdown_table(rows), rows


def macro_table(results: Mapping[str, Sequence[SystemScore]], in_domain: Sequence[str] = ()) -> str:
    """Means over sets, each set counting once; with `in_domain`, also over those sets and over the others.

    The gap between these two is of teacher-normalized F1 (Simple Context Compression, appendix B): a gap of F1 would
    mostly be the gap that full text has.
    """
    own = [name for name in results if name in in_domain]
    others = [name for name in results if name not in in_domain]
    rows = []
    for index, first in enumerate(next(iter(results.values()))):
        each = {name: scores[index] for name, scores in results.items()}
        row = {"context": first.system, "ratio": report.ratio_text(first.ratio)}
        for column, key in (("EM", "exact_match"), ("F1", "f1"), ("contains", "contains")):
            row[column] = f"{mean(getattr(score, key) for score in each.values()):.3f}"
        kept = {name: score.normalized.value for name, score in each.items() if score.normalized is not None}
        if len(kept) == len(each):
            row["teacher-normalized F1"] = f"{mean(kept.values()):.3f}"
        if own and others:
            for where, names in (("in domain", own), ("out of it", others)):
                row[f"F1 {where}"] = f"{mean(each[name].f1 for name in names):.3f}"
            if len(kept) == len(each):
                gap = mean(kept[name] for name in own) - mean(kept[name] for name in others)
                row["teacher-normalized gap"] = f"{gap:+.3f}"
        rows.append(row)
    return report.markdown_table(rows)


def add_to_card(bundle: Bundle, scored: Mapping[str, SetScores]) -> None:
    """Put each set's F1 into the bundle's report, from which its model card is written."""
    for name, one in scored.items():
        rows = [
            {"context": s.system, "ratio": s.ratio, "f1": round(s.f1, 4), "error": round(s.f1_error, 4)}
            for s in one.scores
        ]
        bundle.report.setdefault("scores", {})[name] = {"questions": len(one.questions), "f1": rows}
