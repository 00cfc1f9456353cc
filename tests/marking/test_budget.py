"""Sharing a token budget: never over it, the more relevant the finer, and little of it left over."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_compress_rag.errors import RatioError
from ctx_compress_rag.marking.budget import TEXT, allot

BASE = 4
Passages = list[tuple[int, float | None]]

scores = st.none() | st.sampled_from([0.1, 0.5, 0.5001, 7.0]) | st.floats(allow_infinity=False)
passages = st.lists(st.tuples(st.integers(1, 600), scores), min_size=1, max_size=8)
few_and_short = st.lists(st.integers(1, 60), min_size=1, max_size=4)


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


def slots_of(tokens: list[int]) -> list[int]:
    return [math.ceil(count / BASE) for count in tokens]


def key(score: float | None) -> float:
    return -math.inf if score is None or math.isnan(score) else score


def share(tokens: list[int], slots: list[int], budget: int, **options: object) -> list[int] | None:
    """What is allotted; None where even one slot for each passage is too much."""
    if sum(1 if count else text for count, text in zip(slots, tokens, strict=True)) > budget:
        with pytest.raises(RatioError, match=f"token_budget={budget}"):
            allot(tokens, slots, budget, base_ratio=BASE, **options)
        return None
    return allot(tokens, slots, budget, base_ratio=BASE, **options)


@settings(deadline=None, max_examples=300)
@given(passages, st.integers(1, 3000), st.sets(st.integers(0, 7)))
def test_never_over_budget_and_never_coarser_than_the_less_relevant(
    rows: Passages, budget: int, unstored: set[int]
) -> None:
    tokens = [count for count, _ in rows]
    slots = [0 if i in unstored else count for i, count in enumerate(slots_of(tokens))]
    factors = share(tokens, slots, budget, scores=[score for _, score in rows])
    if factors is None:
        return
    assert sum(map(cost, tokens, slots, factors)) <= budget
    assert all(factor == TEXT for factor, count in zip(factors, slots, strict=True) if not count)
    stored = [i for i, count in enumerate(slots) if count]
    for i in stored:
        for j in stored:
            single = factors[j] != TEXT and factors[j] >= slots[j]
            if key(rows[i][1]) > key(rows[j][1]) and not single:
                assert factors[i] <= factors[j]


@settings(deadline=None, max_examples=300)
@given(few_and_short, st.integers(1, 240), st.booleans())
def test_nine_tenths_are_used_where_passages_allow(tokens: list[int], budget: int, nestable: bool) -> None:
    slots = slots_of(tokens)
    factors = range(TEXT, max(slots) + 1) if nestable else [TEXT, 1]
    possible = usages(tokens, slots, list(factors), budget)
    if not possible:
        with pytest.raises(RatioError, match=f"{len(tokens)} passages do not fit into token_budget={budget}"):
            allot(tokens, slots, budget, base_ratio=BASE, nestable=nestable)
        return
    chosen = allot(tokens, slots, budget, base_ratio=BASE, nestable=nestable)
    used = sum(map(cost, tokens, slots, chosen))
    assert used in possible
    assert used >= 0.9 * budget or used == max(possible)


def test_the_best_stay_text_and_the_rest_get_coarser() -> None:
    # c = 0.8125: ratios of at least 0.8, 3.25, 13 and 52 are the text, 25, 7 and 2 slots.
    assert allot([100] * 4, [25] * 4, 134, base_ratio=4) == [TEXT, 1, 4, 13]
    # c = 1.25: ratios of at least 1.25, 5, 20 and 80 use 25 + 13 + 5 + 1 of 45.
    assert allot([100] * 4, [25] * 4, 45, base_ratio=4) == [1, 2, 5, 25]
    # They leave too much of 60: the last two get finer, the better of them first.
    assert allot([100] * 4, [25] * 4, 60, base_ratio=4) == [1, 2, 3, 4]
    assert allot([100] * 4, [25] * 4, 400, base_ratio=4) == [TEXT] * 4


def test_thousands_of_passages_need_little_memory() -> None:
    rng = random.Random(1)
    tokens = [250_000, *(rng.randint(50, 1_000) for _ in range(2_047))]
    slots = [-(-count // 4) for count in tokens]
    tracemalloc.start()
    factors = allot(tokens, slots, 249_999, base_ratio=4)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 200e6
    assert sum(-(-s // f) if f else t for t, s, f in zip(tokens, slots, factors, strict=True)) <= 249_999


def test_scores_decide_the_order_and_nothing_else() -> None:
    in_order = allot([100] * 4, [25] * 4, 60, base_ratio=4)
    for scores in ([9.0, 3.0, 2.0, 1.0], [-1.0, -1.5, -70.0, None], [1e-9, 0.0, -1e-9, math.nan]):
        assert allot([100] * 4, [25] * 4, 60, base_ratio=4, scores=scores) == in_order
        assert allot([100] * 4, [25] * 4, 60, base_ratio=4, scores=scores[::-1]) == in_order[::-1]
    assert allot([100] * 4, [25] * 4, 52, base_ratio=4, scores=[0.5] * 4) == [2] * 4
