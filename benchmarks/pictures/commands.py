"""The command `inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.lab import lab
from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import AnyBundle, Output, quiet_models, read_text
from ctx_compress_rag.errors import ConfigError


@command("passage.txt --bundle runs/comprexit/answer/bundle", lab)
def inspect(
    text: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A text, or JSONL of questions; text beyond the bundle's window is left out."
        ),
    ],
    bundle: AnyBundle,
    passages: Annotated[int, typer.Option(metavar="N", help="Maximum number of passages from JSONL.")] = 100,
    ratio: Annotated[
        int | None, typer.Option(metavar="R", help="Source tokens per slot.  [default: the bundle's own]")
    ] = None,
    output: Output = "ctx-compress-inspect",
) -> None:
    """Plot what a bundle does with a text, or on average with the passages of JSONL.

    ComprExIT: gates over layers, the transmission plan from tokens to slots, and how far slots share tokens.
    Compression tokens: how far they attend to the same tokens.
    ArcAligner: how many loops its gates give each slot, layer by layer.
    Also writes the numbers as JSON.
    """
    from benchmarks.pictures.inspect import inspect as plot
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.data.examples import read_jsonl

    if passages < 1:
        raise ConfigError(f"cannot inspect {passages} passages: give 1 or more")
    if text.endswith((".jsonl", ".jsonl.gz")):
        rows = read_jsonl(text, unanswerable=True)
        given = list(dict.fromkeys(passage for row in rows for passage in row.passages))[:passages]
    else:
        given = [read_text(text)]
    quiet_models()
    for file in plot(Bundle.from_pretrained(bundle), given, output, ratio):
        print(file)
