"""Commands that write the invented world's data to files, and train on them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.lab import lab
from benchmarks.world import RECIPES
from ctx_compress_rag.cli.shared import command

Split = Annotated[Literal["train", "dev", "test"], typer.Option(help="Which names appear.")]


@command("runs/world/test.jsonl --split test --passages 1", lab)
def world_examples(
    file: Annotated[str, typer.Argument(metavar="FILE")],
    split: Split = "train",
    seed: int = 0,
    count: Annotated[int, typer.Option(help="Prompts.")] = 400,
    passages: Annotated[list[int] | None, typer.Option(metavar="N...", help="Per prompt, drawn.  [default: 4]")] = None,
    turns: Annotated[int, typer.Option(help="Most questions of a prompt.")] = 1,
    named: Annotated[float | None, typer.Option(help="Share of sentences that name what the passage is about.")] = None,
    alike: Annotated[float, typer.Option(help="Share of prompts whose passages are all of one kind.")] = 0.0,
) -> None:
    """Write passages of the invented world, and questions about them, as JSONL."""
    from benchmarks.world.world import world_examples
    from ctx_compress_rag.data.examples import write_jsonl

    Path(file).parent.mkdir(parents=True, exist_ok=True)
    made = world_examples(split, seed, count, turns, passages or [4], named, alike)
    print(f"{write_jsonl(file, made)} questions in {file}")


@command("runs/world/families/train", lab)
def world_families(
    folder: Annotated[str, typer.Argument(metavar="DIR")],
    split: Split = "train",
    count: Annotated[int, typer.Option(help="Questions of each family.")] = 64,
) -> None:
    """Write task families for adaptation: JSONL files, each a task."""
    from benchmarks.world.task_families import write_families

    print(f"{write_families(Path(folder), split, count)} families in {folder}")


@command("rag_gd/demo/rag_gd_k1", lab)
def world_train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or one in benchmarks/world/recipes.")],
) -> None:
    """Train by a recipe, as `ctx-compress train` does; knows the stages of benchmarks, too."""
    import benchmarks.adaptation.hypertuning
    import benchmarks.adaptation.prompt_tuning  # noqa: F401, they register their stages
    from ctx_compress_rag.training.run import run_recipe

    own = RECIPES / f"{recipe}.yaml"
    print(f"written to {run_recipe(own if own.exists() else recipe)}")
