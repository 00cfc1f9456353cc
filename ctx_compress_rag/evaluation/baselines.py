"""Hard baselines: the passages' own text, cut to as many tokens as the soft context takes.

Truncation and extraction keep one text per passage, in order (empty if nothing of a passage is left), so that
prompts are built as from the full passages. The budget is a total over the passages; the result
never has more tokens, counted passage by passage without special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctx_compress_rag.text.sentences import sentences

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def truncate(passages: Sequence[str], tokenizer: Any, budget: int) -> list[str]:
    """Keep the first tokens of each passage, the budget shared in proportion to the passages' lengths.

    Shares are whole tokens by the method of largest remainders, so that they sum to the budget.

    Args:
        passages: texts.
        tokenizer: the decoder's transformers tokenizer (a fast one: offsets are needed).
        budget: tokens in all, 0 or more.
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


@dataclass(frozen=True)
class RankedSentence:
    """A sentence, its position, and its similarity to the question.

    Attributes:
        text: the sentence, without space around it.
        passage: index of its passage.
        position: index of the sentence in its passage.
        similarity: cosine of its vector and the question's.
    """

    text: str
    passage: int
    position: int
    similarity: float


def rank_sentences(passages: Sequence[str], question: str, encoder: SentenceTransformer) -> list[RankedSentence]:
    """All sentences of the passages, nearest to the question first, by cosine of their vectors.

    Args:
        passages: texts.
        question: what is asked.
        encoder: a sentence encoder.

    Raises:
        MissingExtraError: the `sentences` extra is not installed.
    """
    places = [
        (sentence, passage, position)
        for passage, text in enumerate(passages)
        for position, sentence in enumerate(filter(None, map(str.strip, sentences(text))))
    ]
    if not places:
        return []
    vectors = encoder.encode(
        [question, *(sentence for sentence, _, _ in places)], normalize_embeddings=True, show_progress_bar=False
    )
    similarities = (vectors[1:] @ vectors[0]).tolist()
    ranked = [RankedSentence(*place, similarity) for place, similarity in zip(places, similarities, strict=True)]
    return sorted(ranked, key=lambda s: (-s.similarity, s.passage, s.position))


def select(ranked: Sequence[RankedSentence], n_passages: int, tokenizer: Any, budget: int) -> list[str]:
    """The best sentences that fit the budget, put back in the order of the text.

    The first sentence that no longer fits is cut to the rest of the budget, so that the baseline uses all
    of it even if it is shorter than a sentence.

    Args:
        ranked: sentences, best first.
        n_passages: number of passages they come from.
        tokenizer: the decoder's transformers tokenizer.
        budget: tokens in all, 0 or more.
    """
    kept: list[tuple[int, int, str]] = []
    left = budget
    for sentence in ranked:
        text = _head(sentence.text, tokenizer, left)
        if text:
            kept.append((sentence.passage, sentence.position, text))
        # With a space before it: most tokenizers split a text's first word differently from later ones.
        left -= count(f" {text}", tokenizer)
        if left <= 0 or text != sentence.text:
            break
    kept.sort()
    texts = [" ".join(text for passage, _, text in kept if passage == i) for i in range(n_passages)]
    return truncate(texts, tokenizer, budget)  # joined text may count a token or two more


def count(text: str, tokenizer: Any) -> int:
    """Tokens of a text, without special ones."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _head(text: str, tokenizer: Any, tokens: int) -> str:
    """The longest start of a text that ends with one of its tokens and has at most `tokens`.

    Cut text can have other tokens than inside the whole text, and a byte-level token can end within a
    character, so the tokens of the cut text are counted again.
    """
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) <= tokens:
        return text
    for keep in range(tokens, 0, -1):
        head = text[: offsets[keep - 1][1]]
        if count(head, tokenizer) <= tokens:
            return head
    return ""
