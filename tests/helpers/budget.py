"""What a token budget could be spent on, counted plainly."""

from __future__ import annotations

import math

from ctx_compress_rag.marking.budget import TEXT


def cost(tokens: int, slots: int, factor: int) -> int:
    return tokens if factor == TEXT or slots == 0 else math.ceil(slots / min(factor, slots))


def usages(tokens: list[int], slots: list[int], factors: list[int], budget: int, finest: int = 0) -> set[int]:
    """All totals within the budget that are possible, each passage no finer than the one before, tried one by one."""
    if not tokens:
        return {0}
    found = set()
    for place in range(finest, len(factors)):
        own = cost(tokens[0], slots[0], factors[place])
        if own <= budget:
            found |= {own + rest for rest in usages(tokens[1:], slots[1:], factors, budget - own, place)}
    return found
