"""The command `ctx-compress info`, which prints what an index holds."""

from typing import Annotated

from typer import Option

from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import INDEX, Index


@command("--index ./chroma")
def info(
    index: Index = INDEX,
    prune: Annotated[
        bool, Option("--prune", help="First delete soft contexts without a passage in the index, also those of apps.")
    ] = False,
) -> None:
    """Print what an index holds."""
    from ctx_compress_rag.indexing.index import inspect_index

    found = inspect_index(index, prune)
    if prune:
        print(f"deleted soft contexts without a passage: {len(found.orphans)}")
    kept = found.store
    rows = {
        "bundle": f"{kept.bundle} ({found.bundle_name})",
        "embedder": found.embedder,
        "fingerprint": kept.fingerprint,
        "passages": f"{kept.passages:,} from {found.sources:,} files",
        "source tokens": f"{kept.source_tokens:,}",
        "slots": f"{kept.slots:,} at ratio {kept.base_ratio}",
        "codec": kept.codec,
        "payload bytes": f"{kept.payload_bytes:,}",
        "bytes on disk": f"{kept.disk_bytes:,}, with texts, retrieval vectors and Chroma's own data",
        "payload share": f"{kept.payload_share or 0:.0%}",
    }
    if found.orphans and not prune:
        rows["orphans"] = f"{len(found.orphans):,} soft contexts without a passage (--prune deletes them)"
    for name, value in rows.items():
        print(f"{name:<14} {value}")
