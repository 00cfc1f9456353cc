"""The command `ctx-compress backup`, which copies an index."""

from pathlib import Path
from typing import Annotated

import typer

from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import Store


@command("--store ./chroma ./chroma-copy")
def backup(
    store: Store,
    target: Annotated[str, typer.Argument(metavar="FOLDER", help="Where the copy goes; must not exist.")],
) -> None:
    """Copy a whole index.

    Other programs may write to the index meanwhile. The copy contains the store's key and can be used at once.
    """
    from ctx_compress_rag.indexing.index import check_index_exists
    from ctx_compress_rag.store.place import StoreFolder

    check_index_exists(store)
    StoreFolder(Path(store)).back_up(Path(target))
    print(f"{store} copied to {target}")
