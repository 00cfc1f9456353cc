"""The command train."""

from __future__ import annotations

import argparse
import time


def train_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of train."""
    parser.add_argument(
        "recipes",
        nargs="+",
        metavar="RECIPE",
        help="a YAML file, a folder of them, or a shipped one: a recipe such as demo/teacher, a folder such as english",
    )
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="stop after so long, a checkpoint saved (default: at the end)"
    )
    parser.add_argument("--no-resume", action="store_true", help="start anew where a run was interrupted")


def run_train(args: argparse.Namespace) -> None:
    """Run training recipes, one after the other. An interrupted run goes on at its last checkpoint.

    A recipe that has been run to its end is not run again.
    """
    from ctx_compress_rag.errors import TimeUpError
    from ctx_compress_rag.training.recipes import load_recipe, recipe_names

    recipes = [recipe for name in args.recipes for recipe in recipe_names(name)]
    for recipe in recipes:
        load_recipe(recipe)  # a fault in the last one is told before the first is run
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    from ctx_compress_rag.training.run import run_recipe  # takes seconds, which count

    try:
        for recipe in recipes:
            print(f"{recipe}: written to {run_recipe(recipe, resume=not args.no_resume, deadline=deadline)}")
    except TimeUpError as stop:
        print(stop)
