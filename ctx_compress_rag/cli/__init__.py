"""The command line, `ctx-compress`: each command reads its arguments, calls one module and prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from ctx_compress_rag import __version__
from ctx_compress_rag.cli.command import app

# Importing a module registers its commands; the help lists them in this order.
from ctx_compress_rag.cli import stores  # isort: skip # noqa: F401
from ctx_compress_rag.cli import serving  # isort: skip # noqa: F401
from ctx_compress_rag.cli import maintenance  # isort: skip # noqa: F401
from ctx_compress_rag.cli import training  # isort: skip # noqa: F401
from ctx_compress_rag.cli import evaluation  # isort: skip # noqa: F401


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 2 for an error that the user can fix, 130 if interrupted."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a terminal's encoding lacks must not end a command
    try:
        app(args=argv, prog_name="ctx-compress")
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """Compress passages into soft contexts, keep them in Chroma, ask a local decoder."""
