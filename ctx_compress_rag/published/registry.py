"""The list of published formats, and the search for a checkpoint's format."""

from __future__ import annotations

from ctx_compress_rag.errors import BundleError
from ctx_compress_rag.published.format import Format
from ctx_compress_rag.published.icae import Icae
from ctx_compress_rag.published.lclm import Lclm
from ctx_compress_rag.published.pisco import Pisco
from ctx_compress_rag.published.remote_files import Checkpoint
from ctx_compress_rag.published.xrag import Xrag

FORMATS: tuple[Format, ...] = (Lclm(), Pisco(), Xrag(), Icae())


def recognized(checkpoint: Checkpoint) -> Format:
    """Return the format of a checkpoint. Raise BundleError if it has no known format."""
    for each in FORMATS:
        if each.matches(checkpoint):
            return each
    inside = f", or name one of its folders {checkpoint.folders} as subfolder" if checkpoint.folders else ""
    names = ", ".join(each.name for each in FORMATS)
    raise BundleError(f"{checkpoint} is of no format known here ({names}): give another checkpoint{inside}")
