"""Score ways to follow demonstrations, with the cost of each, for `python -m benchmarks adapt-eval`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from tqdm.auto import tqdm

from benchmarks.adaptation.cost import AdaptationCost, measure
from benchmarks.adaptation.episodes import digest, drawn_apart
from benchmarks.adaptation.systems import (
    AT_TEST_TIME,
    BASE,
    Recipes,
    System,
    TestTimeSGD,
    controls,
    copy_rule,
)
from benchmarks.scoring.paired import paired_difference
from benchmarks.world.task_families import write_families
from ctx_compress_rag.adaptation.stages import AdaptationTasks, Episode, UpdatePredictorRecipe, open_recipe_decoder
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.report import ConfidenceInterval, new_figure, save_figure
from ctx_compress_rag.text.answers import exact_match, token_f1
from ctx_compress_rag.training.engine.saved_states import write_json
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from ctx_compress_rag.training.run import folder_weights_digest

_FAMILY_QUESTIONS = 64  # of which up to 8 times as many as a question's demonstrations only demonstrate
_RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the recipe's own


@dataclass(frozen=True)
class SystemScore:
    """The scores of one system.

    Attributes:
        system: its name.
        exact_match, f1: means over questions with 95 % bootstrap intervals.
        gain: F1 minus the base adapter's, paired by question, likewise.
        by_task: mean exact match and F1 of each task.
        cost: per question.
        questions: how many were asked.
    """

    system: str
    exact_match: ConfidenceInterval
    f1: ConfidenceInterval
    gain: ConfidenceInterval
    by_task: dict[str, tuple[float, float]]
    cost: AdaptationCost
    questions: int

    @property
    def macro(self) -> tuple[float, float]:
        """Exact match and F1, each the mean of the tasks' means."""
        exact, f1 = zip(*self.by_task.values(), strict=True)
        return mean(exact), mean(f1)


def evaluate(
    where: str | Path,
    folder: str | Path,
    *,
    files: Sequence[str | Path] = (),
    split: Literal["dev", "test"] = "test",
    budget: int | None = None,
    questions: int = 400,
    timed: int = 20,
    tuning: int = 32,
    max_tokens: int = 32,
) -> list[SystemScore]:
    """Train a folder's recipes that are not finished, and score all of them and the baselines.

    Every question has demonstrations of its own task, the same for every system. Trained weights stay in the
    recipes' outputs and answers in `folder`, so that a second run resumes where an interrupted one stopped.
    Writes scores.json, scores.md and scores.png. The arguments are the command's; `tuning` is the most other questions
    for choosing a learning rate for TT-SGD, with the smallest and with the largest K.

    Raises:
        ConfigError: the recipes do not belong together, or an output was made by another recipe or for another decoder.
        DataError: a file is missing, malformed or too short; nothing is trained then.
    """
    folder = Path(folder)
    recipes = Recipes.find(where)
    if budget is not None:
        recipes = recipes.shortened(budget, folder)
    decoder = open_recipe_decoder(recipes.base)
    paths = [Path(file) for file in files] or _families(folder / "families", split)
    data = recipes.base.data.model_copy(update={"files": paths, "held_out": []})
    tasks = AdaptationTasks(data, TrainingPromptBuilder(decoder.bundle.tokenizer))
    shown = [recipe.demonstrations for recipe in recipes.others if isinstance(recipe, UpdatePredictorRecipe)]
    episodes, held_back = drawn_apart(tasks, questions, tuning, max(shown, default=3))  # before training: it may refuse
    recipes.train_missing(decoder)
    systems = recipes.systems(decoder)
    sampling = Sampling(max_tokens=max_tokens)
    about = {
        "recipes": [recipe.model_dump(mode="json") for recipe in (recipes.base, *recipes.others)],
        "fingerprint": decoder.bundle.fingerprint,
        "trained": [folder_weights_digest(recipe.output) for recipe in (recipes.base, *recipes.others)],
        "data": [path.name for path in paths] if files else f"task families, {split}",
        "episodes": digest([*episodes, *held_back]),
        "questions": len(episodes),
        "tuning": len(held_back),
        "max_tokens": max_tokens,
    }
    systems += _tuned(decoder, systems, held_back, sampling, folder / "tuning", about)
    systems += controls(systems, decoder, episodes) + ([] if files else [copy_rule()])
    answers = answer_all(decoder, systems, episodes, sampling, folder / "answers", about)
    scores = score(episodes, answers, measure(decoder, systems, episodes, sampling, timed))
    about |= {"timed": timed, "device": str(decoder.bundle.backbone.device)}
    report.write_report(folder, "scores", table(scores), {**about, "scores": [asdict(s) for s in scores]})
    plot(scores, folder / "scores.png", f"{about['questions']} questions, {about['data']}")
    return scores


def _families(folder: Path, split: Literal["dev", "test"]) -> list[Path]:
    """Files of the invented world's task families, written now."""
    write_families(folder, split, _FAMILY_QUESTIONS)
    return sorted(folder.glob("*.jsonl"))


def answer_all(
    decoder: Decoder,
    systems: Sequence[System],
    episodes: Sequence[Episode],
    sampling: Sampling,
    folder: Path,
    about: Mapping[str, Any],
) -> dict[str, list[str]]:
    """Each system's answers, each question with its own demonstrations.

    Answers are kept in `folder`, and reused if `about`, which says what they depend on, is the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers = {}
    for system in tqdm(systems, desc="answering", unit="system"):
        file = folder / f"{system.name.replace(' ', '_').replace(',', '')}.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if kept.get("about") != about:
            kept = {"about": about, "answers": _answers(decoder, system, episodes, sampling)}
            write_json(file, kept)
        answers[system.name] = kept["answers"]
    return answers


def _answers(decoder: Decoder, system: System, episodes: Sequence[Episode], sampling: Sampling) -> list[str]:
    done: list[str] = []
    for episode in system.given(episodes):
        [made] = system.adapt(decoder, episode).generate([system.chat(episode)], sampling)
        done.append(system.finish(made.text.strip(), episode))
    return done


def _tuned(
    decoder: Decoder,
    systems: Sequence[System],
    episodes: Sequence[Episode],
    sampling: Sampling,
    folder: Path,
    about: Mapping[str, Any],
) -> list[System]:
    """TT-SGD with the fewest and with the most steps, each at the learning rate with the best F1 on these episodes."""
    found = {s.adaptation.steps: s.adaptation for s in systems if isinstance(s.adaptation, TestTimeSGD)}
    chosen = []
    for steps in sorted({min(found), max(found)}) if found and episodes else ():
        rates = [factor * found[steps].learning_rate for factor in _RATES]
        tried = [System(f"K={steps} {rate:.3g}", replace(found[steps], learning_rate=rate)) for rate in rates]
        answers = answer_all(decoder, tried, episodes, sampling, folder, about)
        f1 = [
            mean(token_f1(text, e.answers) for text, e in zip(answers[system.name], episodes, strict=True))
            for system in tried
        ]
        best = tried[f1.index(max(f1))]
        chosen.append(System(f"{AT_TEST_TIME}{steps}, tuned", best.adaptation))
    return chosen


def score(
    episodes: Sequence[Episode], answers: Mapping[str, Sequence[str]], costs: Mapping[str, AdaptationCost]
) -> list[SystemScore]:
    """Score each system's answers; one of the systems must be the base adapter."""

    def each(metric: Any, system: str) -> list[float]:
        return [metric(given, e.answers) for given, e in zip(answers[system], episodes, strict=True)]

    base = each(token_f1, BASE)
    nothing = [0.0] * len(episodes)
    scores = []
    for system in answers:
        exact, f1 = each(exact_match, system), each(token_f1, system)
        tasks: dict[str, list[tuple[float, float]]] = {}
        for one, other, episode in zip(exact, f1, episodes, strict=True):
            tasks.setdefault(episode.task, []).append((one, other))
        scores.append(
            SystemScore(
                system=system,
                exact_match=paired_difference(exact, nothing),
                f1=paired_difference(f1, nothing),
                gain=paired_difference(f1, base),
                by_task={
                    task: (mean(e for e, _ in values), mean(f for _, f in values))
                    for task, values in sorted(tasks.items())
                },
                cost=costs[system],
                questions=len(episodes),
            )
        )
    return scores


def table(scores: Sequence[SystemScore]) -> str:
    """The scores as a Markdown table."""
    return report.markdown_table(
        [
            {
                "system": s.system,
                "EM": report.interval_text(s.exact_match),
                "F1": report.interval_text(s.f1),
                "EM, F1 by task": f"{s.macro[0]:.3f}, {s.macro[1]:.3f}",
                "F1 over base adapter": "" if s.system == BASE else report.interval_text(s.gain, "+"),
                "adapt ms": f"{s.cost.adapt_ms:.1f}",
                "answer ms": f"{s.cost.answer_ms:.1f}",
                "adapt GFLOPs": f"{s.cost.adapt_flops / 1e9:.2f}",
                "answer GFLOPs": f"{s.cost.answer_flops / 1e9:.2f}",
            }
            for s in scores
        ]
    )


def plot(scores: Sequence[SystemScore], path: Path, title: str) -> None:
    """F1 with its interval against the time a question takes, adapting included, on a log scale (as figure 4)."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure = new_figure(8.0, 4.6)
    axes = figure.subplots()
    for number, s in enumerate(scores):
        bars = [[s.f1.value - s.f1.low], [s.f1.high - s.f1.value]]
        marker = "o" if s.system.startswith("RAG-GD") else "s" if s.system.startswith("TT-SGD") else "^"
        axes.errorbar(
            s.cost.adapt_ms + s.cost.answer_ms, s.f1.value, yerr=bars, marker=marker, color=f"C{number % 10}",
            markerfacecolor=None if number < 10 else "white", linestyle="none", capsize=3, label=s.system,
        )  # fmt: skip
    axes.set(
        xscale="log",
        xlabel="milliseconds per question, adapting and answering",
        ylabel="answer F1 (bars: 95 % bootstrap)",
    )
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, path)
