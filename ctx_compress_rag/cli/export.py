"""`ctx-compress export`: a bundle's decoder for vLLM."""

from __future__ import annotations

from typing import Annotated

import typer

from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import quiet_models


@command("runs/mine/bundle ./for-vllm")
def export(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="A bundle's folder, hub id or shipped name.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where to write.")],
) -> None:
    """Write a bundle's decoder for vLLM.

    Also writes its LoRA adapters, and prints the command that serves both.
    """
    import shlex

    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.decoding import export as exporting

    quiet_models()
    print(shlex.join(exporting.export(Bundle.from_pretrained(bundle), folder)))
