"""The rule for a ratio (source tokens per slot) and for a reduction (how many times shorter a prompt's context is)."""

from __future__ import annotations

from ctx_compress_rag.errors import RatioError


def merge_factor(ratio: int, base: int, *, nestable: bool = True, name: str = "it") -> int:
    """How many slots, stored at `base` source tokens each, become one at `ratio`.

    Args:
        ratio: what is asked for.
        base: what is stored.
        nestable: whether slots can be merged at all.
        name: what stores them, for the error.

    Raises:
        RatioError: the ratio is no multiple of the base, or another one while slots cannot be merged.
    """
    if ratio < base or ratio % base:
        raise RatioError(f"ratio {ratio} cannot be made from slots stored at {base}: choose a multiple of {base}")
    if ratio != base and not nestable:
        raise RatioError(
            f"{name} stores one ratio: use ratio={base}, or index again at {ratio} (slots cannot be merged, "
            f"only {base} is stored)"
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
        raise RatioError(f"reduction={reduction}: close reading makes the context shorter by 2 or more")
