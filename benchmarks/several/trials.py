"""Short trainings of the shipped bundle on the same batches, each with something else, and what they change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from benchmarks.scoring.paired import paired_difference
from benchmarks.several.losses import HEADS, SeveralCollator, SeveralLoss
from benchmarks.several.neighbors import among_neighbors
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example, read_jsonl, spread
from ctx_compress_rag.data.held_out import HeldOut
from ctx_compress_rag.evaluation.answering import SOFT, answer
from ctx_compress_rag.evaluation.harness import each
from ctx_compress_rag.evaluation.questions import questions_of
from ctx_compress_rag.evaluation.report import interval, mean, table
from ctx_compress_rag.json_files import write_json
from ctx_compress_rag.methods.base.config import WrapConfig
from ctx_compress_rag.methods.base.projections import Wrap
from ctx_compress_rag.text.answers import token_f1
from ctx_compress_rag.training.config import OptimConfig
from ctx_compress_rag.training.engine.loop import Job, train
from ctx_compress_rag.training.prompts import PromptBuilder

RATIOS = (4, 8)
COUNTS = (1, 4, 4)  # passages of a prompt: two thirds have several
LONGEST = 384  # tokens of a passage: the bundle's window
BATCH = 4


@dataclass(frozen=True)
class Trial:
    """What a training has beside the answers."""

    wrap: bool = False
    attention: float = 0.0
    quote: float = 0.0


TRIALS = {
    "answers": Trial(),
    "wrap vectors": Trial(wrap=True),
    "attention": Trial(attention=0.3),
    "quoted evidence": Trial(quote=0.5),
}


@dataclass(frozen=True)
class Plan:
    """The data of all trials: files to train on, to score on and to hold out besides; how much of each."""

    train: Sequence[str]
    dev: Sequence[str]
    held_out: Sequence[str]
    steps: int
    questions: int
    output: Path


Scores = dict[str, list[float]]
"""Losses, hits and F1 of each question, by what was measured."""


def run(plan: Plan, names: Sequence[str]) -> dict[str, Scores]:
    """Run the trials that have no result yet; the shipped bundle is "start". An interrupted one resumes."""
    results, examples = {}, list[Example]()
    for name in ["start", *names]:
        file = plan.output / f"{name}.json"
        if not file.exists():
            plan.output.mkdir(parents=True, exist_ok=True)
            bundle = Bundle.from_pretrained("smollm2-135m", device="cpu", dtype="bfloat16")
            report = {}
            if name != "start":
                examples = examples or prompts(plan)
                report = trained(bundle, examples, plan.steps, TRIALS[name], plan.output / name)
            scores = {key: values for dev in plan.dev for key, values in measured(bundle, dev, plan.questions).items()}
            write_json(file, {"scores": scores, "report": report})
        results[name] = json.loads(file.read_text())["scores"]
    return results


def prompts(plan: Plan) -> list[Example]:
    """The training prompts, the same for every trial."""
    held_out = HeldOut(e for file in (*plan.dev, *plan.held_out) for e in read_jsonl(file, unanswerable=True))
    examples: list[Example] = []
    for file in plan.train:
        read = [e for e in held_out.without(read_jsonl(file, 3), file) if len(e.passages[0].split()) < 200]
        # Neighbors in the file have similar subjects: blocks keep them together.
        blocks = spread([read[i : i + 60] for i in range(0, len(read), 60)], 2 * plan.steps * BATCH // 60 + 1)
        examples += [e for block in blocks for e in block]
    mixed = among_neighbors(examples, COUNTS)
    order = np.random.default_rng(0).permutation(len(mixed))[: plan.steps * BATCH]
    return [mixed[i] for i in order]


def trained(bundle: Bundle, examples: Sequence[Example], steps: int, trial: Trial, folder: Path) -> dict[str, Any]:
    """Train a bundle in place; returns the training's report."""
    if trial.wrap:
        bundle.reader.wrap = wrap = Wrap(WrapConfig(before=1, after=1), bundle.backbone.dim)
        newline = bundle.tokenizer("\n", add_special_tokens=False).input_ids
        with torch.no_grad():
            for vectors in (wrap.before, wrap.after):
                vectors.copy_(bundle.backbone.embeddings(torch.tensor(newline)))
    loss = SeveralLoss(bundle, trial.attention, trial.quote)
    loss.ratios = RATIOS
    collate = SeveralCollator(builder(bundle), [bundle.config.template], 8 * LONGEST, 0, quote=trial.quote > 0)

    def on_step(step: int) -> None:
        loss.step = step

    optim = OptimConfig(
        steps=steps,
        batch_size=BATCH,
        learning_rate=3e-4,
        muon_learning_rate=6e-4,
        final_learning_rate=5e-5,
        average=0.95,
        bf16=True,
        save_every=20,
        log_every=10,
    )
    job = Job(loss, examples, collate, lambda report: None, on_step=on_step)
    report = train(job, optim, folder, seed=0)
    loss.eval()
    return report


def builder(bundle: Bundle) -> PromptBuilder:
    """Renders prompts as the stages of training do."""
    return PromptBuilder(bundle.tokenizer, 64, bundle.config.separator, bundle.config.answer_prefix)


@torch.no_grad()
def measured(bundle: Bundle, file: str, count: int) -> Scores:
    """Loss of each question's answer, hits of the heads, and F1 of quoted answers, with one and four passages."""
    alone = [e for e in read_jsonl(file) if len(e.passages[0].split()) < 200]
    alone = spread([Example(e.passages, e.turns[:1]) for e in alone], 3 * count)
    scores: Scores = {}
    loss = SeveralLoss(bundle)
    collate = SeveralCollator(builder(bundle), [bundle.config.template], 8 * LONGEST, 0)
    for passages in (1, 4):
        # Every third is asked; the others are there to be distractors.
        examples = among_neighbors(alone, [passages])[::3]
        of = f"{Path(file).name.split('.')[0]}, {passages} passages"
        for start in tqdm(range(0, count, 4 * BATCH), desc=f"{of}: loss"):
            batch = collate(examples[start : start + 4 * BATCH])
            evidence, [*lengths] = batch["evidence"], batch["prompts"].answer_lengths()
            for ratio, slots in loss.compress(batch["passages"], RATIOS).items():
                logits, answers, looks = loss.read(batch["prompts"], slots, evidence, ratio)
                losses = cross_entropy(logits, answers, reduction="none").split(lengths)
                scores.setdefault(f"{of}, {ratio}x: loss", []).extend(float(own.mean()) for own in losses)
                # One look for each head and then each prompt with evidence.
                shares = (-torch.stack(looks)).exp().view(len(HEADS), -1).mean(0)
                scores.setdefault(f"{of}, {ratio}x: attention", []).extend(shares.tolist())
        questions = questions_of(examples)
        for (_, at), given in answer(bundle, questions, RATIOS, [SOFT], extractive=True).items():
            scores[f"{of}, {at}x: F1"] = each(token_f1, given.texts, questions)
    return scores


def report(results: dict[str, Scores]) -> str:
    """A table of the means with their errors, and paired differences: of "answers" from "start", of others from it."""
    rows = []
    for key in results["start"]:
        row = {"measured": key}
        for name, scores in results.items():
            row[name] = mean(scores[key])
            before = "start" if name == "answers" else "answers"
            if name != "start" and before in results:
                row[name] += f", {interval(paired_difference(scores[key], results[before][key]), '+')}"
        rows.append(row)
    return table(rows)
