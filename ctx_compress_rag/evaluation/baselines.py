"""Hard baselines: the passages' own text, cut to as many tokens as the soft context takes.

They keep one text per passage, in order (empty if nothing of a passage is left), so that prompts are built as from the
full passages. The budget is a total over the passages, and never exceeded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ctx_compress_rag.marking.budget import NOTHING, Budget, Retrieved, Sentence, Shown
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR


def truncate(passages: Sequence[str], tokenizer: Any, budget: int) -> list[str]:
    """Keep the first tokens of each passage, the budget shared in proportion to the passages' lengths.

    Shares are whole tokens by the method of largest remainders, so that they sum to the budget. Offsets are needed: the
    tokenizer must be a fast one.
    """
    lengths = [count(text, tokenizer) for text in passages]
    total = sum(lengths)
    if total <= budget:
        return list(passages)
    shares = [budget * length // total for length in lengths]
    by_remainder = sorted(range(len(lengths)), key=lambda i: (-(budget * lengths[i] % total), i))
    for i in by_remainder[: budget - sum(shares)]:
        shares[i] += 1
    return [_head(text, tokenizer, share) for text, share in zip(passages, shares, strict=True)]


def extract(near: Sequence[Sequence[Sentence]], tokens: Callable[[str], Sequence[int]], budget: int) -> list[str]:
    """The sentences nearest to the question that fit, in the order of the text; the first that does not is cut."""

    def count(shown: Sequence[Shown]) -> int:
        return len(tokens(PASSAGE_SEPARATOR.join(each.text for each in shown if each.text)))

    passages = [Retrieved("", sentences=own) for own in near]
    return [each.text for each in Budget(passages, budget, count).with_sentences([NOTHING] * len(near))]


def count(text: str, tokenizer: Any) -> int:
    """Tokens of a text, without special ones."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _head(text: str, tokenizer: Any, tokens: int) -> str:
    """The longest start of a text that ends with one of its tokens and has at most `tokens`, counted on its own."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) <= tokens:
        return text
    for keep in range(tokens, 0, -1):
        head = text[: offsets[keep - 1][1]]
        if count(head, tokenizer) <= tokens:
            return head
    return ""
