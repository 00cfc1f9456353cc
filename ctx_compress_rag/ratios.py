"""Rules for a ratio: source tokens per slot."""

from __future__ import annotations

from ctx_compress_rag.errors import RatioError


def merge_factor(ratio: int, base: int, *, nestable: bool = True) -> int:
    """How many slots, stored at `base` source tokens each, become one at `ratio`.

    Args:
        ratio: the requested ratio.
        base: the stored ratio.
        nestable: whether slots can be merged at all.

    Raises:
        RatioError: the ratio is not a multiple of the base, or differs from it although slots cannot be merged.
    """
    if ratio < base or ratio % base:
        raise RatioError(f"ratio {ratio} cannot be made from slots stored at {base}: choose a multiple of {base}")
    if ratio != base and not nestable:
        raise RatioError(
            f"ratio {ratio} cannot be made: this method's slots cannot be merged, and here they are stored at {base}: "
            f"use ratio={base}, or index again at {ratio}"
        )
    return ratio // base


def check_window(ratio: int, window: int) -> None:
    """Refuse a ratio that does not divide an encoder's window.

    Raises:
        RatioError: it does not divide the window.
    """
    if ratio < 1 or window % ratio:
        raise RatioError(f"ratio {ratio} does not divide the encoder's window of {window} tokens")
