"""The command `ctx-compress backup`, which copies an index."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import Index


@command("--index ./chroma ./chroma-copy")
def backup(
    index: Index,
    target: Annotated[str, Argument(metavar="FOLDER", help="Where the copy goes; must not exist.")],
) -> None:
    """Copy a whole index.

    Other programs may write to the index meanwhile. The copy contains the store's key and can be used at once.
    """
    from ctx_compress_rag.indexing.index import check_index_exists
    from ctx_compress_rag.store.place import StoreFolder

    check_index_exists(index)
    StoreFolder(Path(index)).back_up(Path(target))
    print(f"{index} copied to {target}")
