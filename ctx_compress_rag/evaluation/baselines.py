"""Cut the passages' own text to as many tokens as the soft context takes, for baselines that are hard to beat.

A baseline keeps one text per passage, in order (empty if nothing of a passage is left), so that prompts are built as
from the full passages. The budget is the most tokens of all passages together.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ctx_compress_rag.marking.budget import NOTHING, Budget, RetrievedText, ScoredSentence, ShownPassage
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR


def truncate_passages(passages: Sequence[str], tokenizer: Any, budget: int) -> list[str]:
    """Return the first tokens of each passage as text; the passages share the budget in proportion to their lengths.

    Shares are whole tokens by the method of largest remainders, so that they sum to the budget; passages within it stay
    whole. The tokenizer must be a fast one, because offsets are needed.
    """
    lengths = [count_tokens(text, tokenizer) for text in passages]
    total = sum(lengths)
    if total <= budget:
        return list(passages)
    shares = [budget * length // total for length in lengths]
    by_remainder = sorted(range(len(lengths)), key=lambda i: (-(budget * lengths[i] % total), i))
    for i in by_remainder[: budget - sum(shares)]:
        shares[i] += 1
    return [_head(text, tokenizer, share) for text, share in zip(passages, shares, strict=True)]


def extract_sentences(
    near: Sequence[Sequence[ScoredSentence]], tokens: Callable[[str], Sequence[int]], budget: int
) -> list[str]:
    """Return, per passage, its sentences nearest to the question that fit, in order; the first that does not is cut."""

    def count(shown: Sequence[ShownPassage]) -> int:
        return len(tokens(PASSAGE_SEPARATOR.join(each.text for each in shown if each.text)))

    passages = [RetrievedText("", sentences=own) for own in near]
    return [each.text for each in Budget(passages, budget, count).with_sentences([NOTHING] * len(near))]


def count_tokens(text: str, tokenizer: Any) -> int:
    """Return the number of tokens of a text, without special tokens."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _head(text: str, tokenizer: Any, tokens: int) -> str:
    """Return the longest start of a text that ends with one of its tokens and has at most `tokens` by itself."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) <= tokens:
        return text
    for keep in range(tokens, 0, -1):
        head = text[: offsets[keep - 1][1]]
        if count_tokens(head, tokenizer) <= tokens:
            return head
    return ""
