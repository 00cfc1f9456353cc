"""`ctx-compress import`: a published compressor becomes a bundle."""

from __future__ import annotations

from typing import Annotated

import typer

from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import quiet_models


@command("naver/pisco-mistral ./pisco")
def import_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A published checkpoint's hub id or folder.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where the bundle goes.")],
    subfolder: Annotated[
        str | None, typer.Option(metavar="DIR", help="The checkpoint's place in the repository, if it has several.")
    ] = None,
    revision: Annotated[str | None, typer.Option(metavar="REV", help="A hub revision.  [default: the newest]")] = None,
    decoder: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The decoder it was trained for.  [default: the one that it names]"),
    ] = None,
    encoder: Annotated[str | None, typer.Option(metavar="MODEL", help="Its encoder, likewise.")] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Put decoder and encoder into the bundle, for machines without network.")
    ] = False,
) -> None:
    """Convert a published compressor into a bundle: LCLM, PISCO, CLaRa, xRAG, ICAE.

    Prints its license, sizes and memory first. Run again, the command fetches only what is not complete yet.
    """
    from ctx_compress_rag.published.importing import Import

    quiet_models()
    found = Import.of(name, subfolder=subfolder, revision=revision, decoder=decoder, encoder=encoder)
    size = found.parameters()
    rows = {
        "format": found.format.name,
        "license": found.license,
        "commit": found.checkpoint.revision or "none: a folder",
        "decoder": str(found.skeleton.files),
        "encoder": str(found.encoder or "the decoder"),
        "files": f"{found.download / 1e9:.1f} GB in all",
        "memory": ", ".join(f"{size * bits / 8e9:.1f} GB in {bits} bits" for bits in (16, 8, 4)),
    }
    for key, value in rows.items():
        print(f"{key:<8} {value}", flush=True)
    found.write(folder, copy=copy)
    print(f"\nthe bundle is in {folder}: ask it with `ctx-compress index` and `ask --bundle {folder}`")
