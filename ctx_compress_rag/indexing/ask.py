"""Make the decoder's prompt from a question and retrieved passages, as `ctx-compress ask` sends it."""

from __future__ import annotations

from collections.abc import Sequence

from ctx_compress_rag.indexing.index import Hit
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, messages


def question_prompt(
    store: SoftContextStore,
    question: str,
    hits: Sequence[Hit],
    ratio: int | None = None,
    template: str = TEMPLATES[0],
    *,
    token_budget: int | None = None,
    as_text: bool = False,
) -> list[dict[str, str]]:
    """The chat messages that ask a question about passages, in the form that decoders are trained on.

    A passage whose soft context is missing is compressed now.

    Args:
        store: the soft contexts of the passages.
        question: the question.
        hits: the passages; an empty list asks without context.
        ratio: how many times shorter the passages become, as in `mark`; by default the smallest.
        template: the prompt, see `text.templates`; a bundle's own is `config.template`.
        token_budget: in place of a ratio, the maximum tokens of all passages; the nearest get the finest ratios.
        as_text: give the passages as text.

    Raises:
        ConfigError: a ratio and a budget are given, or the bundle takes no budget.
        RatioError: the ratio cannot be made from what is stored, or the passages do not fit into the budget.
    """
    texts = [hit.text for hit in hits]
    if not as_text:
        texts = mark(
            store,
            texts,
            [hit.id for hit in hits],
            ratio=ratio,
            token_budget=token_budget,
            scores=[hit.similarity for hit in hits],
            question=question,
        )
    return messages(template, PASSAGE_SEPARATOR.join(texts), question)
