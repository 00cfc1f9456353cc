"""The command `compare`."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.lab import lab
from ctx_compress_rag.cli.shared import Output, command


@command("--budget 0.5 --entries mean_pooling comprexit", lab)
def compare(
    comparison: Annotated[
        str, typer.Argument(metavar="FILE", help="A YAML file of entries, or a shipped one.")
    ] = "natural",
    budget: Annotated[
        float, typer.Option(metavar="N", help="Training operations per entry, forward and backward, in 10^15.")
    ] = 2.0,
    entries: Annotated[
        list[str] | None, typer.Option(metavar="NAME...", help="Only these.  [default: all in the file]")
    ] = None,
    questions: Annotated[int, typer.Option(metavar="N", help="Questions to score with.")] = 200,
    passages: Annotated[int, typer.Option(metavar="N", help="Passages per prompt.")] = 1,
    decoder: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A decoder's folder or hub id, in place of the file's decoder and teacher.",
        ),
    ] = None,
    table_only: Annotated[bool, typer.Option("--table-only", help="Train nothing; show the finished entries.")] = False,
    output: Output = "ctx-compress-compare",
) -> None:
    """Train methods at equal compute and score them.

    All start from the same decoder and have the same budget of operations. Writes one table and one plot, also when an
    entry fails. Run it again after an interruption: finished entries are kept, the others resume at their last
    checkpoint. To train several at the same time, run it several times with other --entries.
    """
    from benchmarks.compare.config import BASELINES, chosen, load_comparison
    from benchmarks.compare.report import save, text
    from benchmarks.compare.run import Plan, prepare, run_job

    described = load_comparison(comparison)
    if decoder is not None:
        described = described.model_copy(update={"decoder": decoder, "teacher": None})
    names = chosen(described, entries)
    folder = Path(output)
    if not table_only:
        plan = Plan(
            folder,
            described.decoder,
            described.teacher,
            budget,
            passages,
            questions,
            described.ratios,
            described.data,
            described.dtype,
        )
        todo = prepare(described, names, plan)
        try:
            for job in todo:
                run_job(job)
        except Exception:
            if plan.result(BASELINES).exists():  # without them there is nothing to report
                save(described, folder)
            raise
    print(text(described, save(described, folder)))
    print(f"\nalso in {output}/compare.md and compare.png")
