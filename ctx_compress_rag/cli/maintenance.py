"""Commands that look after a store's folder: repair, backup, vacuum."""

from __future__ import annotations

from typing import Annotated

import typer

from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import Store, quiet_models


@command("repair", "--store ./chroma")
def repair(
    store: Store,
    reseal: Annotated[
        bool,
        typer.Option(
            "--reseal",
            help="Seal records of a lost key, or from before there were seals, with the key in use; only if nobody "
            "else could write to DIR.",
        ),
    ] = False,
) -> None:
    """Mend a damaged index.

    Makes it anew from its records where Chroma cannot read it, beside a copy as it was. Stop whatever else has the
    folder open first. After an interruption run it again.
    """
    from ctx_compress_rag.app.upkeep import repair_store

    quiet_models()
    report = repair_store(store, reseal)
    print(f"{store} as it was: {report.backup}")
    for name, records in report.rebuilt.records.items():
        print(f"index made anew: {name}, {records} records")
    if reseal:
        print(f"sealed anew: {report.resealed} records")
    for name in report.rebuilt.broken:
        print(f"damaged and left: {name}; its vectors are not this program's: make it anew with the app that made it")
    if report.damaged:
        print(f"cannot be read: {len(report.damaged)} records, {report.damaged[0]!r} first")
        print("`ctx-compress index` compresses them again; if a key was lost, --reseal keeps those that are whole")


@command("backup", "--store ./chroma ./chroma-copy")
def backup(
    store: Store,
    target: Annotated[str, typer.Argument(metavar="FOLDER", help="Where the copy goes; must not exist.")],
) -> None:
    """Copy an index whole.

    While others may be writing to it; the copy has the key in it and is used as it is.
    """
    from ctx_compress_rag.app.upkeep import back_up_store

    back_up_store(store, target)
    print(f"{store} copied to {target}")


@command("vacuum", "--store ./chroma")
def vacuum(store: Store) -> None:
    """Write over what was deleted from an index.

    Deleted texts are gone from the database and from Chroma's log, and the file shrinks. Stop whatever else has the
    folder open first.
    """
    from ctx_compress_rag.app.upkeep import vacuum_store

    print(f"{store}: {vacuum_store(store):,} bytes given back")
