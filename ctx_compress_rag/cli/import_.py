"""The command `ctx-compress import`, which makes a bundle of a published compressor."""

from typing import Annotated

from typer import Argument, Option

from ctx_compress_rag.cli.command import command


@command("latent-context/0.6b-4b-LCLM-4x ./lclm")
def import_(
    name: Annotated[str | None, Argument(metavar="NAME", help="A published checkpoint's hub id or folder.")] = None,
    folder: Annotated[
        str | None, Argument(metavar="DIR", help="Where the bundle goes.  [default: nowhere; only print facts]")
    ] = None,
    subfolder: Annotated[
        str | None, Option(metavar="DIR", help="The checkpoint's place in the repository, if it has several.")
    ] = None,
    revision: Annotated[str | None, Option(metavar="REV", help="A hub revision.  [default: the newest]")] = None,
    decoder: Annotated[
        str | None, Option(metavar="MODEL", help="The decoder it was trained for.  [default: the one that it names]")
    ] = None,
    encoder: Annotated[str | None, Option(metavar="MODEL", help="Its encoder, likewise.")] = None,
    copy: Annotated[
        bool, Option("--copy", help="Put decoder and encoder into the bundle, for machines without network.")
    ] = False,
    list_: Annotated[bool, Option("--list", help="List the checkpoints that are known, and their licenses.")] = False,
) -> None:
    """Convert a published compressor (LCLM, PISCO, CLaRa, xRAG, ICAE) into a bundle.

    First prints licenses, downloads and memory. A second run fetches only what is not complete yet.
    """
    from ctx_compress_rag.published.importing import FORMATS, PublishedImport

    if list_ or name is None:
        for each in FORMATS:
            for arguments, license in each.known:
                print(f"{each.name:<8} {license:<14} {arguments}")
        return
    found = PublishedImport.of(name, subfolder=subfolder, revision=revision, decoder=decoder, encoder=encoder)
    spaces = {"every": "before every text", "first": "before a prompt's first text only", "none": "never"}
    sizes = (f"{found.parameters * bits / 8e9:.1f} GB in {bits}" for bits in (32, 16, 8, 4))
    rows = {
        "format": found.format.name,
        "license": found.licenses["checkpoint"],
        "commit": found.checkpoint.revision or "none: a folder",
        **{part: f"{files} ({found.licenses[part]})" for part, files in found.parts.items()},
        "tokenizer": f"adds a space {spaces[found.decoder.spaces]}",
        "import": f"reads {found.read_now / 1e9:.1f} GB, in about {0.5 + found.read_now / 1e9:.1f} GB of memory",
        "first use": f"reads {found.read_in_use / 1e9:.1f} GB, the decoder and the encoder",
        "memory": f"{', '.join(sizes)} bits; without a GPU, it is 32 unless you give --dtype bfloat16",
        "check": found.format.caution,
    }
    for key, value in rows.items():
        if value:
            print(f"{key:<10} {value}", flush=True)
    if folder is not None:
        found.write(folder, copy=copy)
        print(f"\nthe bundle is in {folder}: `ctx-compress index FILES --bundle {folder}`, then `ctx-compress ask`")
