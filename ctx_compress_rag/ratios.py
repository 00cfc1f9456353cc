"""Rules for a ratio (source tokens per slot) and a reduction (how many times shorter a prompt's context becomes)."""

from __future__ import annotations

from ctx_compress_rag.errors import RatioError


def merge_factor(ratio: int, base: int, *, nestable: bool = True, name: str = "it") -> int:
    """How many slots, stored at `base` source tokens each, become one at `ratio`.

    Args:
        ratio: the requested ratio.
        base: the stored ratio.
        nestable: whether slots can be merged at all.
        name: the method's or bundle's name, for the error message.

    Raises:
        RatioError: the ratio is not a multiple of the base, or differs from it although slots cannot be merged.
    """
    if ratio < base or ratio % base:
        raise RatioError(f"ratio {ratio} cannot be made from slots stored at {base}: choose a multiple of {base}")
    if ratio != base and not nestable:
        raise RatioError(
            f"{name} stores one ratio, here {base}, and its slots cannot be merged: use ratio={base}, or index again "
            f"at {ratio}"
        )
    return ratio // base


def check_window(ratio: int, window: int) -> None:
    """Refuse a ratio that does not divide an encoder's window.

    Raises:
        RatioError: it does not divide the window.
    """
    if ratio < 1 or window % ratio:
        raise RatioError(f"ratio {ratio} does not divide the encoder's window of {window} tokens")


def check_reduction(reduction: int) -> None:
    """Refuse a reduction that close reading cannot reach.

    Raises:
        RatioError: it is below 2.
    """
    if reduction < 2:
        raise RatioError(f"reduction={reduction}: close reading needs a reduction of 2 or more")
