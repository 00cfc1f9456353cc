"""Commands that look after a store's folder: repair, backup."""

from __future__ import annotations

import argparse

from ctx_compress_rag.cli.shared import quiet_models, store_option


def repair_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of repair."""
    store_option(parser)
    parser.add_argument(
        "--reseal",
        action="store_true",
        help="seal records of a lost key, or from before there were seals, with the key in use; only if nobody else "
        "could write to DIR",
    )


def run_repair(args: argparse.Namespace) -> None:
    """Mend a folder that Chroma cannot read: make its index anew from its records, beside a copy as it was.

    Stop whatever else has the folder open first. After an interruption run it again.
    """
    from ctx_compress_rag.app.upkeep import repair_store

    quiet_models()
    report = repair_store(args.store, args.reseal)
    print(f"{args.store} as it was: {report.backup}")
    for name, records in report.rebuilt.records.items():
        print(f"index made anew: {name}, {records} records")
    if args.reseal:
        print(f"sealed anew: {report.resealed} records")
    for name in report.rebuilt.broken:
        print(f"damaged and left: {name}; its vectors are not this program's: make it anew with the app that made it")
    if report.damaged:
        print(f"cannot be read: {len(report.damaged)} records, {report.damaged[0]!r} first")
        print("`ctx-compress index` compresses them again; if a key was lost, --reseal keeps those that are whole")


def backup_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of backup."""
    store_option(parser)
    parser.add_argument("target", metavar="FOLDER", help="where the copy goes; must not exist")


def run_backup(args: argparse.Namespace) -> None:
    """Copy a store's folder while others may be writing to it; the copy has the key in it and is used as it is."""
    from ctx_compress_rag.app.upkeep import back_up_store

    back_up_store(args.store, args.target)
    print(f"{args.store} copied to {args.target}")
