"""The command `data`."""

from typing import Annotated

import typer

from benchmarks.lab import lab
from ctx_compress_rag.cli.shared import command


@command("hotpotqa hotpot_dev_distractor_v1.json --output hotpotqa.jsonl", lab)
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
    split: Annotated[str, typer.Option(metavar="NAME", help="Split of the hub's set.")] = "validation",
    limit: Annotated[int | None, typer.Option(metavar="N", help="Maximum questions.  [default: all]")] = None,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="File to write.  [default: NAME.jsonl]")] = None,
) -> None:
    """Write a published data set as JSONL.

    Rows have question, answers, context and, for stage ram, the evidence that the set marks, as `train` and `eval` read
    them. Sets without passages (nq, popqa, bamboogle) need a FILE with retrieved passages under "ctxs". In a FILE of
    hotpotqa, 2wikimultihopqa or musique, passages under "ctxs" replace the set's own. narrativeqa's context is the
    story's summary. FILE has the hub's rows for triviaqa and narrativeqa; for multinews it is the .src file, with the
    summaries in .tgt beside it.
    """
    from benchmarks.datasets.published import convert

    written = output or f"{name}.jsonl"
    print(f"{convert(name, file, written, split=split, limit=limit)} questions in {written}")
