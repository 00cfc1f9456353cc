"""Share a token budget among retrieved passages: the more relevant a passage, the more of it is kept."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from numbers import Real
from operator import or_

from ctx_compress_rag.errors import RatioError
from ctx_compress_rag.store.marker import MAX_FACTOR

Relevance = float | None


def relevance(score: object) -> Relevance:
    """A score as frameworks and rerankers give it, as a float; None if it is not a number."""
    if not isinstance(score, Real):  # numpy's scalars are Reals, too
        return None
    try:
        return float(score)
    except OverflowError:
        return math.inf if score > 0 else -math.inf  # type: ignore[operator]


TEXT = 0
"""In place of a factor: the passage stays text."""

_STEP = 4.0
_MOST_STEPS = 500  # more would overflow
_LEAST_SHARE = 0.9
_MOST_BITS = 1 << 30  # that the search for better ratios may hold: 128 MB, about a second


def allot(
    tokens: Sequence[int],
    slots: Sequence[int],
    budget: int,
    *,
    base_ratio: int,
    scores: Sequence[Relevance] | None = None,
    nestable: bool = True,
    positions: Callable[[int], int] = int,
) -> list[int]:
    """Choose how each passage is read, so that all together take at most `budget` tokens of the prompt.

    Scores decide only the order, since retrievers' scales differ. Ideally, each passage gets a ratio four times
    that of the passage before it, as MiniLM finds the answer about a quarter as often at each further rank
    (benchmarks/results/scores.md); all ratios are as fine as the budget allows, and a ratio of 1 is the text. Ratios
    come in steps (a large one from the text to the base ratio). If that leaves more than a tenth of the budget unused,
    the nearest ratios that leave less are chosen; if there are none, the ratios that use the most.

    - The tokens never exceed the budget.
    - No passage is read at a coarser ratio than a less relevant one. (A passage with a single slot left
      cannot be made coarser, and is not compared.)
    - At least 90% of the budget is used if any ratios in this order can do so; otherwise as much as possible.
      (For thousands of passages and a large budget, finding them would take minutes: the first choice stays.)

    Args:
        tokens: tokens of each passage's text.
        slots: stored slots of each passage; a passage with 0 stays text, whatever its rank.
        budget: maximum tokens of all passages.
        base_ratio: source tokens per stored slot.
        scores: relevance of each passage, higher is better; passages without a score (None, NaN) come last, in
            the given order. If `scores` is None, the passages are in order, best first.
        nestable: whether neighboring slots can be merged; if not, a passage is either text or its stored slots.
        positions: how many tokens some slots of a passage count as: by default one each.

    Returns: for each passage how many of its stored slots are merged into one, or `TEXT`.

    Raises:
        RatioError: the passages do not fit into the budget even at the coarsest ratio.
    """
    if sum(tokens) <= budget:
        return [TEXT] * len(tokens)
    order, ranks = _ranked(len(tokens), scores)
    levels = [TEXT, *(_factors(slots) if nestable else [1])]
    # costs[place][level]: tokens of the passage at a place in the order. One slot is the least, whatever the factor,
    # and text that is shorter than its slots stays text.
    costs = [
        [tokens[i] if not (slots[i] and f) else min(tokens[i], positions(-(-slots[i] // f))) for f in levels]
        for i in order
    ]
    least = sum(cost[-1] for cost in costs)
    if least > budget:
        raise RatioError(
            f"{len(tokens)} passages do not fit into token_budget={budget}: at the coarsest ratio they take {least} "
            "tokens; retrieve fewer, or raise the budget"
        )
    ratios = [base_ratio * factor or 1 for factor in levels]
    wanted = _graded(costs, ratios, [_STEP ** min(rank - 1, _MOST_STEPS) for rank in ranks], budget)
    search = len(order) * len(levels) * budget
    if _total(costs, wanted) < _LEAST_SHARE * budget and search <= _MOST_BITS:
        wanted = _nearest(costs, wanted, budget)
    chosen = dict(zip(order, wanted, strict=True))
    factors = [levels[chosen[i]] if slots[i] else TEXT for i in range(len(tokens))]
    return [f if f and positions(-(-slots[i] // f)) <= tokens[i] else TEXT for i, f in enumerate(factors)]


def _ranked(count: int, scores: Sequence[Relevance] | None) -> tuple[list[int], list[int]]:
    """Passages from the most to the least relevant, and their ranks from 1; equal scores share a rank."""
    if scores is None:
        return list(range(count)), list(range(1, count + 1))
    known = [-math.inf if score is None or math.isnan(score) else score for score in scores]
    order = sorted(range(count), key=lambda i: -known[i])
    ranks = list(range(1, count + 1))
    for place in range(1, count):
        if known[order[place]] == known[order[place - 1]] > -math.inf:
            ranks[place] = ranks[place - 1]
    return order, ranks


def _factors(slots: Sequence[int]) -> list[int]:
    """The factors at which some passage gets fewer slots, in order."""
    found = {min(-(-count // left), MAX_FACTOR) for count in set(slots) for left in range(1, count + 1)}
    return sorted(found | {1})


def _total(costs: Sequence[Sequence[int]], levels: Sequence[int]) -> int:
    return sum(cost[level] for cost, level in zip(costs, levels, strict=True))


def _graded(costs: Sequence[Sequence[int]], ratios: list[int], discounts: Sequence[float], budget: int) -> list[int]:
    """For each place, the finest level with a ratio of at least c times its discount, for the least c that fits."""
    finest = sorted({ratio / discount for ratio in ratios for discount in discounts})

    def levels(c: float) -> list[int]:
        # The tolerance undoes the division's rounding; if all ratios are too fine, the last level is taken.
        return [min(bisect_left(ratios, c * d * (1 - 1e-9)), len(ratios) - 1) for d in discounts]

    return levels(finest[bisect_left(finest, True, key=lambda c: _total(costs, levels(c)) <= budget)])


def _nearest(costs: Sequence[Sequence[int]], wanted: Sequence[int], budget: int) -> list[int]:
    """The levels nearest to `wanted`, best passage first, that use at least `_LEAST_SHARE` of the budget, or the most.

    A set of totals is an integer with a bit for each. reach[place][level] has the totals of the passages from this
    place on, with the first of them at this level and none finer than the one before it.
    """
    within = (1 << (budget + 1)) - 1
    coarser = [1] * len(costs[0])  # after the last passage, the only total is 0
    reach = []
    for cost in reversed(costs):
        at = [(after << spent) & within for after, spent in zip(coarser, cost, strict=True)]
        reach.append(at)
        coarser = list(accumulate(reversed(at), or_))[::-1]  # for each level, what it or a coarser one reaches
    reach.reverse()
    most = coarser[0].bit_length() - 1
    lowest = min(most, math.ceil(_LEAST_SHARE * budget))
    levels: list[int] = []
    spent = 0
    for at, cost, level in zip(reach, costs, wanted, strict=True):
        first = levels[-1] if levels else 0
        enough = [i for i in range(first, len(at)) if (at[i] << spent & within) >> lowest]
        levels.append(min(enough, key=lambda i: (abs(i - level), i)))
        spent += cost[levels[-1]]
    return levels
