"""The commands `several-data` and `several-mix`."""

from typing import Annotated

import typer

from benchmarks.lab import lab
from ctx_compress_rag.cli.shared import command


@command("qa_train.jsonl.gz --held-out qa_dev_nq.jsonl.gz --output data/several.jsonl", lab)
def several_data(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="JSONL rows of one passage each.")],
    held_out: Annotated[
        list[str], typer.Option("--held-out", metavar="FILE...", help="JSONL rows that must not be trained on.")
    ],
    passages: Annotated[
        list[int] | None, typer.Option(metavar="N...", help="Passages of a prompt, drawn from these.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="How often each question is taken, with other distractors.")
    ] = 1,
    output: Annotated[str, typer.Option(metavar="FILE", help="File to write.")] = "several.jsonl",
) -> None:
    """Write training questions whose passage stands among its nearest neighbors.

    By default two thirds of the prompts have two to eight passages. Neighbors are found by MiniLM and do not mention
    the answers.
    """
    from benchmarks.several.neighbors import among_neighbors
    from ctx_compress_rag.data.examples import read_jsonl, write_jsonl
    from ctx_compress_rag.data.held_out import HeldOut

    kept_out = HeldOut(e for file in held_out for e in read_jsonl(file, unanswerable=True))
    examples = [e for file in files for e in kept_out.without(read_jsonl(file, 4), file)]
    mixed = among_neighbors(examples, passages or [1, 1, 1, 2, 3, 4, 5, 6, 8], rounds)
    print(f"{write_jsonl(output, mixed)} questions in {output}")


@command("smollm2-135m runs/several/bundle --share 0.6", lab)
def several_mix(
    start: Annotated[str, typer.Argument(metavar="BUNDLE", help="The bundle that training started from.")],
    trained: Annotated[str, typer.Argument(metavar="BUNDLE", help="The trained one.")],
    share: Annotated[float, typer.Option(metavar="S", min=0, max=1, help="Weight of the trained one.")] = 0.6,
    output: Annotated[str, typer.Option(metavar="DIR", help="Folder of the mixed bundle.")] = "mixed",
) -> None:
    """Average the weights of a bundle and of what was trained from it."""
    from benchmarks.several.mix import mix
    from ctx_compress_rag.bundle.bundle import Bundle

    mix(Bundle.from_pretrained(start), Bundle.from_pretrained(trained), share).save_pretrained(output, int8=True)
