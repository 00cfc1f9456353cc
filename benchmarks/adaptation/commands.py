"""The command `adapt-eval`."""

from typing import Annotated, Literal

import typer

from benchmarks.lab import lab
from ctx_compress_rag.cli.shared import Output, command


@command("--recipes rag_gd/demo --budget 100", lab)
def adapt_eval(
    recipes: Annotated[str, typer.Option(metavar="DIR", help="A folder of recipes, or one by name.")] = "rag_gd/demo",
    data: Annotated[
        list[str] | None, typer.Option(metavar="FILE...", help="JSONL files, each a task.  [default: invented ones]")
    ] = None,
    split: Annotated[Literal["dev", "test"], typer.Option(help="Split of the invented tasks.")] = "test",
    budget: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Maximum training steps per recipe, for a quick test.  [default: its own]"),
    ] = None,
    questions: Annotated[int, typer.Option(metavar="N", min=2, help="Questions to score with.")] = 400,
    timed: Annotated[int, typer.Option(metavar="N", min=1, help="Questions to time.")] = 20,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer.")] = 32,
    output: Output = "ctx-compress-adapt-eval",
) -> None:
    """Score adaptation to demonstrations.

    Compares predicted updates (RAG-GD) with their baselines. First trains what is missing: the base retrieval adapter,
    a soft prefix, the predictors. Run it again after an interruption to resume.
    """
    from benchmarks.adaptation.run import evaluate, table

    scores = evaluate(
        recipes,
        output,
        files=data or (),
        split=split,
        budget=budget,
        questions=questions,
        timed=timed,
        max_tokens=max_tokens,
    )
    print(table(scores))
    asked = scores[0].questions  # files may hold fewer
    print(f"\n{asked} questions, each with demonstrations; also in {output}/scores.json, .md and .png")
