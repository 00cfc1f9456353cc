"""The table, the plot and the papers' orderings, from a comparison's results so far."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare.config import BASELINES, Comparison, Ordering
from benchmarks.compare.panels import plot_panels
from benchmarks.compare.run import check_recipes, read_result, read_run, result_file, shown_at
from benchmarks.scoring.paired import paired_difference
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.answering import EXTRACTED, FULL, NONE, SOFT, TRUNCATED
from ctx_compress_rag.evaluation.report import ConfidenceInterval, ScoreCurve, standard_error, teacher_normalized

_CURVES = 5  # in a plot: more cannot be told apart
_SHOWN_BY = 3.0  # standard errors
_OFF_BUDGET = 0.1  # mark contexts that are off from one slot per `ratio` tokens by more than this share


@dataclass(frozen=True)
class Cell:
    """One system at one ratio.

    Attributes:
        f1, exact_match: a score for each question, 0 to 1.
        normalized: teacher-normalized F1 with its 95 % bootstrap interval.
        context_tokens: tokens that the context adds to the prompt, a slot counting as one: mean over questions.
        real_ratio: the full text's tokens / `context_tokens`.
        stored_bytes: mean stored size of a passage; None for baselines.
    """

    f1: list[float]
    exact_match: list[float]
    normalized: ConfidenceInterval | None
    context_tokens: float
    real_ratio: float
    stored_bytes: float | None


@dataclass(frozen=True)
class EntryRow:
    """A system at all its ratios.

    Attributes:
        name: of the system or entry.
        method: of the entry.
        cells: by ratio.
        costs: the cost of training and compressing; empty for baselines.
        control: F1 of each question with another question's slots, at the ratio `shown_at`; empty for baselines.
    """

    name: str
    method: str
    cells: dict[int, Cell]
    costs: dict[str, Any]
    control: list[float]

    def over(self, none: Sequence[float]) -> list[list[float]]:
        """Each question's gain from its own slots: over no context, and over slots of another question's passages."""
        own = self.cells[shown_at(self.cells)].f1
        return [[one - other for one, other in zip(own, others, strict=True)] for others in (none, self.control)]


@dataclass(frozen=True)
class Results:
    """All results of a comparison.

    Attributes:
        run: what was compared, from run.json.
        full, none: F1 of each question with the full text and without context.
        full_exact, none_exact: the same for exact match.
        rows: truncation, extraction, then the entries in the comparison's order.
        missing: entries without a result yet.
    """

    run: dict[str, Any]
    full: list[float]
    none: list[float]
    full_exact: list[float]
    none_exact: list[float]
    rows: list[EntryRow]
    missing: list[str]

    @property
    def entries(self) -> list[EntryRow]:
        """The rows of entries, without the baselines'."""
        return [row for row in self.rows if row.costs]

    @property
    def ratios(self) -> list[int]:
        """All ratios that anything was scored at."""
        return sorted({ratio for row in self.rows for ratio in row.cells})


def read_report(comparison: Comparison, folder: Path) -> Results:
    """Read the results in a comparison's folder.

    Raises:
        ConfigError: it holds no comparison, or one of entries that have changed since; the baselines are not scored
            yet; or a file is damaged.
    """
    try:
        run, baselines = read_run(folder), read_result(folder, BASELINES)
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename} is missing: run the comparison first, without --table-only") from None
    check_recipes(comparison, folder)
    whole = {score["system"]: score for score in baselines["scores"] if score["ratio"] is None}
    full, none = whole[FULL], whole[NONE]

    def cells(scores: Sequence[dict[str, Any]], system: str) -> dict[int, Cell]:
        found = {}
        for score in scores:
            if score["system"] == system:
                context = score["prompt_tokens"] - none["prompt_tokens"]
                found[score["ratio"]] = Cell(
                    f1=score["f1"],
                    exact_match=score["exact_match"],
                    normalized=teacher_normalized(score["f1"], none["f1"], full["f1"]),
                    context_tokens=context,
                    real_ratio=(full["prompt_tokens"] - none["prompt_tokens"]) / max(context, 1.0),
                    stored_bytes=score.get("stored_bytes"),
                )
        return found

    rows = [EntryRow(name, BASELINES, cells(baselines["scores"], name), {}, []) for name in (EXTRACTED, TRUNCATED)]
    missing = []
    for name in comparison.entries:
        if result_file(folder, name).exists():
            result = read_result(folder, name)
            found, control = cells(result["scores"], SOFT), result["another_passage"]["f1"]
            rows.append(EntryRow(name, result["method"]["name"], found, result, control))
        else:
            missing.append(name)
    return Results(run, full["f1"], none["f1"], full["exact_match"], none["exact_match"], rows, missing)


def table(found: Results) -> str:
    """The results as a Markdown table, one line for each entry."""
    # Truncation gets one token per slot, so it shows what each ratio is with passages of these lengths.
    budgets = {r: cell.real_ratio for row in found.rows if row.name == TRUNCATED for r, cell in row.cells.items()}
    return report.markdown_table(
        [
            {
                "context": row.name,
                **{f"{ratio}x": _cell(row.cells.get(ratio), budgets.get(ratio, ratio)) for ratio in found.ratios},
                **_costs(row),
            }
            for row in found.rows
        ]
    )


def _cell(cell: Cell | None, ratio: float) -> str:
    if cell is None:
        return ""
    kept = ""
    if (share := cell.normalized) is not None:
        kept = f" ({share.value:.3f}: {share.low:.3f} to {share.high:.3f})"
    off = "" if abs(cell.real_ratio / ratio - 1) <= _OFF_BUDGET else f" [{cell.real_ratio:.1f}x]"
    return f"{report.mean_text(cell.f1)}{kept}, EM {np.mean(cell.exact_match):.3f}{off}"


def _costs(row: EntryRow) -> dict[str, str]:
    costs = row.costs
    if not costs:
        return {}
    sizes = [cell.stored_bytes for _, cell in sorted(row.cells.items()) if cell.stored_bytes is not None]
    # A nestable method stores one ratio for all, others store each ratio separately.
    stored = [f"{size:,.0f}" for size in (sizes[:1] if len(set(sizes)) == 1 else sizes)]
    interrupted = "over " if costs["interrupted"] else ""
    return {
        "parameters trained": f"{costs['trained_parameters']:,}",
        "examples": f"{costs['examples']:,}",
        "tokens": f"{costs['training_tokens']:,}",
        "minutes": f"{interrupted}{costs['training_seconds'] / 60:,.0f}",
        "ms per passage": f"{1000 * costs['compress_seconds']:.1f}",
        "bytes per passage": " / ".join(stored),
    }


def methods_shown(found: Results) -> list[str]:
    """For each entry, whether it reads its slots, by three standard errors, at 4x or its finest ratio."""
    lines = []
    for row in found.entries:
        gains = [(float(np.mean(gain)), standard_error(gain)) for gain in row.over(found.none)]
        verdict = "shown" if all(mean > _SHOWN_BY * error for mean, error in gains) else "not shown"
        none, other = (f"{mean:+.3f} ± {error:.3f}" for mean, error in gains)
        at = f"{row.name} at {shown_at(row.cells)}x"
        lines.append(f"- **{verdict}**: {at}: over no context {none}, over another passage {other}")
    return lines


def orderings(comparison: Comparison, found: Results) -> list[str]:
    """For each of the papers' orderings, whether it held, by the difference in F1 over the same questions."""
    rows = {row.name: row for row in found.rows}
    reads = {row.name: _reads(row, found.none) for row in found.entries}
    return [_ordering(ordering, rows, reads) for ordering in comparison.orderings]


def _ordering(ordering: Ordering, rows: dict[str, EntryRow], reads: dict[str, bool]) -> str:
    missing = [name for name in (ordering.better, ordering.worse) if name not in rows]
    if missing:
        return f"- **not measured**: {ordering.claim} ({', '.join(missing)} has no result)"
    better, worse = rows[ordering.better].cells, rows[ordering.worse].cells
    shared = sorted(better.keys() & worse.keys())
    if not shared:
        return f"- **not measured**: {ordering.claim} ({ordering.better} and {ordering.worse} share no ratio)"
    each = [paired_difference(better[ratio].f1, worse[ratio].f1) for ratio in shared]
    high, low = (np.mean([cells[ratio].f1 for ratio in shared], axis=0).tolist() for cells in (better, worse))
    whole = paired_difference(high, low)
    verdict = "not shown"
    if whole.low > 0 and _shown(high, low, reads[ordering.better], reads[ordering.worse]):
        verdict = "held"
    elif whole.high < 0 and _shown(low, high, reads[ordering.worse], reads[ordering.better]):
        verdict = "reversed"
    by_ratio = ", ".join(f"{r}x {report.interval_text(d, '+')}" for r, d in zip(shared, each, strict=True))
    at, apart = (f" at {shared[0]}x", "") if len(shared) == 1 else ("", f"; {by_ratio}")
    over = f"{ordering.better} over {ordering.worse}{at} {report.interval_text(whole, '+')}{apart}"
    return f"- **{verdict}**: {ordering.claim}: {over}"


def _reads(row: EntryRow, none: Sequence[float]) -> bool:
    """Whether an entry's gains from its own slots have 95 % intervals above zero."""
    return all(paired_difference(gain, [0.0] * len(gain)).low > 0 for gain in row.over(none))


def _shown(winner: list[float], loser: list[float], winner_reads: bool, loser_reads: bool) -> bool:
    """Whether a difference says something about the methods, not about how two decoders guess.

    The winner must read its slots; the loser must, too, unless the winner's 95 % interval is above the loser's.
    """
    won, lost = (paired_difference(each, [0.0] * len(each)) for each in (winner, loser))
    return winner_reads and (loser_reads or won.low > lost.high)


def text(comparison: Comparison, found: Results) -> str:
    """The whole report as Markdown."""
    run = found.run
    baseline = (
        f"full text {report.mean_text(found.full)}, EM {np.mean(found.full_exact):.3f}; "
        f"no context {report.mean_text(found.none)}, EM {np.mean(found.none_exact):.3f}"
    )
    teacher = f": {run['decoder']} with the LoRA of {run['teacher']} merged into it" if run["teacher"] else ""
    about = [
        f"# {_counts(run)}",
        "",
        f"Questions of {run['test']}, passages in each prompt: {run['passages']}. Every entry was trained with "
        f"{run['budget']:g} x 10^15 operations, forward and backward, on as many examples as they pay for, in the same "
        f"order, from the same decoder{teacher}. That decoder as it is reads full text and no context.",
        "",
        "Answer F1 ± its standard error (teacher-normalized F1, 95 % interval), exact match; in square brackets the "
        "real ratio, where the context is a tenth or more longer or shorter than a slot for so many tokens makes it "
        "(truncation gets as many tokens as that). Time: to compress one passage alone, for the store. Bytes: as "
        "stored, one size for each ratio where a method stores each apart. Tokens: of the passages and prompts trained "
        "on, without slots. Minutes: as measured, perhaps beside other work.",
        "",
        table(found),
        "",
        f"{baseline}.",
        "",
        "*Shown*: an entry answers more from a passage's slots than without context, and more than from the slots of "
        "another question's passage, each by three standard errors of the difference, at 4x, or where it has no 4x at "
        "its finest ratio. The second tells reading from guessing: without context a decoder may decline.",
        "",
        *methods_shown(found),
        "",
        "What the papers say, and the difference in F1 over the same questions, mean of all ratios that both have "
        "(paired bootstrap, 95 % interval). *Held*: the interval is above zero; *reversed*: below. Either counts only "
        "where the winner reads its slots (both differences above are past their 95 % interval), and the loser does, "
        "too, or the two scores' own intervals are apart; else it is *not shown*.",
        "",
        *orderings(comparison, found),
    ]
    if found.missing:
        about += ["", f"Without a result yet: {', '.join(found.missing)}."]
    return "\n".join(about)


def _counts(run: dict[str, Any]) -> str:
    return f"{run['questions']} test questions, {run['budget']:g} x 10^15 operations of training"


def save(comparison: Comparison, folder: Path) -> Results:
    """Write compare.md and compare.png from what `folder` holds so far.

    Raises:
        ConfigError: it holds no comparison.
    """
    found = read_report(comparison, folder)
    report.write_report(folder, "compare", text(comparison, found))
    if found.entries:
        plot_panels(
            folder / "compare.png",
            _panels(found.entries),
            [_curve(row) for row in found.rows if not row.costs],
            {FULL: float(np.mean(found.full)), NONE: float(np.mean(found.none))},
            found.ratios,
            title=f"answer F1 (bars: 95 %): {_counts(found.run)}",
        )
    return found


def _panels(entries: Sequence[EntryRow]) -> dict[str, list[ScoreCurve]]:
    """The curves of each plot, one for each method; several for many entries, since a plot holds few curves."""
    panels: dict[str, list[ScoreCurve]] = {}
    for method in dict.fromkeys(row.method for row in entries):
        curves = [_curve(row) for row in entries if row.method == method]
        for start in range(0, len(curves), _CURVES):
            panels[f"{method} ({start // _CURVES + 1})" if start else method] = curves[start : start + _CURVES]
    return panels


def _curve(row: EntryRow) -> ScoreCurve:
    return ScoreCurve(
        row.name,
        [
            (cell.real_ratio, float(np.mean(cell.f1)), 1.96 * standard_error(cell.f1))
            for _, cell in sorted(row.cells.items())
        ],
    )
