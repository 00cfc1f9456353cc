"""The commands data and train."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ctx_compress_rag.cli.command import command


@command("data", "hotpotqa hotpot_dev_distractor_v1.json --output hotpotqa.jsonl")
def data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="squad, hotpotqa, hotpotqa_gold, 2wikimultihopqa, musique, nq, triviaqa, popqa, bamboogle, "
            "narrativeqa, mrqa or multinews.",
            show_default=False,
        ),
    ],
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="The published file.  [default: from the hub]")
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="Split of the hub's set, or of NarrativeQA's file.")
    ] = "validation",
    limit: Annotated[int | None, typer.Option(metavar="N", help="Maximum questions.  [default: all]")] = None,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="File to write.  [default: NAME.jsonl]")] = None,
) -> None:
    """Write a published data set as JSONL.

    Rows have question, answers, context and, for stage ram, the evidence that the set marks, as `train` and `eval` read
    them. Sets without passages (nq, popqa, bamboogle) need a FILE with retrieved passages under "ctxs". In a FILE of
    hotpotqa, 2wikimultihopqa or musique, passages under "ctxs" replace the set's own. narrativeqa's context is the
    story's summary. Where a set has several files, FILE is, for triviaqa, the one in qa/ (its pages are in evidence/);
    for narrativeqa, qaps.csv (summaries in third_party/wikipedia/); for multinews, the .src file (summaries in .tgt).
    """
    from benchmarks.datasets.published import convert

    written = output or f"{name}.jsonl"
    print(f"{convert(name, file, written, split=split, limit=limit)} questions in {written}")


@command("train", "mean_pooling/teacher mean_pooling/compressor --minutes 60")
def train(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE...",
            show_default=False,
            help="YAML files, folders of them, or shipped ones: a recipe (demo/teacher) or a folder (smollm2).",
        ),
    ],
    minutes: Annotated[
        float | None, typer.Option(metavar="N", help="Save a checkpoint and stop after this time.  [default: no limit]")
    ] = None,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Start again; removes earlier checkpoints.")] = False,
) -> None:
    """Train a bundle from recipes.

    Runs them in order. An interrupted run resumes at its last checkpoint. A finished recipe is not run again.
    """
    from ctx_compress_rag.errors import TimeUpError
    from ctx_compress_rag.training.recipe import load_recipe, recipe_names

    names = [recipe for name in recipes for recipe in recipe_names(name)]
    loaded = [load_recipe(recipe) for recipe in names]  # report an error in any before the first runs
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    from ctx_compress_rag.training.engine.loop import is_main_process
    from ctx_compress_rag.training.run import check_inputs, is_finished, run_recipe  # counts: it takes seconds

    check_inputs(loaded)
    try:
        for name, recipe in zip(names, loaded, strict=True):
            before = not no_resume and is_finished(recipe)
            folder = run_recipe(name, resume=not no_resume, deadline=deadline)
            if is_main_process():
                print(f"{name}: {'finished before, in' if before else 'written to'} {folder}")
    except TimeUpError as stop:
        if is_main_process():
            print(f"{stop}, without --no-resume" if no_resume else stop)
