"""The command `ctx-compress train`, which runs recipes."""

import time
from typing import Annotated

from typer import Argument, Option

from ctx_compress_rag.cli.command import command


@command("mean_pooling/teacher mean_pooling/compressor --minutes 60")
def train(
    recipes: Annotated[
        list[str],
        Argument(
            metavar="RECIPE...",
            show_default=False,
            help="YAML files, folders of them, or shipped ones: a recipe (comprexit/answer) or a folder (smollm2).",
        ),
    ],
    minutes: Annotated[
        float | None,
        Option(metavar="N", min=0, help="Save what is trained, and stop, after this time.  [default: no limit]"),
    ] = None,
    no_resume: Annotated[bool, Option("--no-resume", help="Start again; removes earlier checkpoints.")] = False,
) -> None:
    """Train a bundle from recipes.

    Runs the recipes in order. An interrupted run resumes at its last checkpoint. A finished recipe is not run again.
    """
    from ctx_compress_rag.errors import TimeUpError
    from ctx_compress_rag.training.engine.loop import training_processes
    from ctx_compress_rag.training.recipe import load_recipe, recipe_names
    from ctx_compress_rag.training.run import check_recipe_inputs, is_recipe_finished, run_recipe

    names = [recipe for name in recipes for recipe in recipe_names(name)]
    loaded = [load_recipe(recipe) for recipe in names]  # report an error in any before the first runs
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    check_recipe_inputs(loaded)
    try:
        for name, recipe in zip(names, loaded, strict=True):
            before = not no_resume and is_recipe_finished(recipe)
            folder = run_recipe(name, resume=not no_resume, deadline=deadline)
            if training_processes().is_main_process:
                print(f"{name}: {'finished before, in' if before else 'written to'} {folder}")
    except TimeUpError as stop:
        if training_processes().is_main_process:
            print(f"{stop}, without --no-resume" if no_resume else stop)
