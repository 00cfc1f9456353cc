"""Commands that maintain a store's folder: repair, backup, vacuum."""

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
            help="Seal records of a lost key, or without a seal, with the current key; only safe if nobody else could "
            "write to DIR.",
        ),
    ] = False,
) -> None:
    """Repair a damaged index.

    Copies the folder, then rebuilds the index from its records. First stop everything else that has the folder open.
    After an interruption, run it again.
    """
    from ctx_compress_rag.indexing.upkeep import repair_store

    quiet_models()
    report = repair_store(store, reseal)
    print(f"copy of {store} before the repair: {report.backup}")
    for name, records in report.rebuilt.records.items():
        print(f"index rebuilt: {name}, {records} records")
    if reseal:
        print(f"resealed: {report.resealed} records")
    for name in report.rebuilt.broken:
        print(f"not repaired: {name}; its vectors are not this program's: rebuild it with the app that made it")
    if report.damaged:
        print(f"cannot be read: {len(report.damaged)} records, {report.damaged[0]!r} first")
        print("`ctx-compress index` compresses them again; if a key was lost, --reseal keeps the undamaged ones")


@command("backup", "--store ./chroma ./chroma-copy")
def backup(
    store: Store,
    target: Annotated[str, typer.Argument(metavar="FOLDER", help="Where the copy goes; must not exist.")],
) -> None:
    """Copy a whole index.

    Others may write to it meanwhile. The copy contains the key and is used as it is.
    """
    from ctx_compress_rag.indexing.upkeep import back_up_store

    back_up_store(store, target)
    print(f"{store} copied to {target}")


@command("vacuum", "--store ./chroma")
def vacuum(store: Store) -> None:
    """Overwrite what was deleted from an index.

    Removes deleted texts from the database and from Chroma's log, and shrinks the file. First stop everything else that
    has the folder open.
    """
    from ctx_compress_rag.indexing.upkeep import vacuum_store

    print(f"{store}: {vacuum_store(store):,} bytes freed")
