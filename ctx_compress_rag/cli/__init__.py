"""Run the command line, `ctx-compress`; a command reads arguments, calls one module and prints."""

import gc
from collections.abc import Sequence
from typing import Annotated

import typer

from ctx_compress_rag import __version__
from ctx_compress_rag.cli.shared import app, run_command

# Importing a file registers its commands; the help lists them in this order.
from ctx_compress_rag.cli import index, ask, serve, bundle, score  # isort: skip # noqa: F401


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code, which is 0, 2 for an error that the user can fix, or 130 if interrupted."""
    # Else Python looks for garbage again and again among the modules of torch, a fifth of the time that imports take.
    gc.set_threshold(100_000, 50, 50)
    return run_command(app, argv)


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
