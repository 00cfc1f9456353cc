"""Restrict an extractive answer to quotations of the prompt or its passages.

Slots tell a decoder roughly what a passage says, so it misspells names and numbers. The store has the exact text.
"""

from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np

from ctx_compress_rag.decoding.settings import Scores
from ctx_compress_rag.prompt import Quotable, QuotedToken

_Run = tuple[tuple[QuotedToken, ...], int]


class QuoteFilter:
    """A filter that allows only tokens with which one answer stays a quotation of whole words within `limit` tokens."""

    def __init__(self, quotable: Quotable, end_ids: Collection[int], limit: int) -> None:
        self._tokens = quotable.tokens
        self._end_ids = sorted(end_ids)
        self._limit = limit
        # All places where the answer so far occurs in what it may quote; before its first token, all where one begins.
        self._runs: Sequence[_Run] = list(chain.from_iterable(quotable.starts.values()))
        self._may_end = False

    def __call__(self, ids: Sequence[int], scores: Scores) -> Scores:
        """Return the scores (vocabulary,) of the token after `ids`, the answer so far; -inf forbids a token."""
        if ids:
            self._take(ids[-1])
        left = self._limit - len(ids) - 1  # tokens that may follow the next one
        following = {token.id for token in map(self._next, self._runs) if token is not None and token.to_end <= left}
        ends = [end for end in self._end_ids if end < len(scores)]  # GLM 4's config names some beyond a vocabulary
        allowed = [*following, *(ends if self._may_end or not following else ())]
        masked = np.full_like(scores, -np.inf)
        masked[allowed] = scores[allowed]
        return masked

    def _take(self, id: int) -> None:
        """Continue all quotations with the token `id`; after an end token only end tokens can follow."""
        taken = [(run, token) for run in self._runs if (token := self._next(run)) is not None and token.id == id]
        self._runs = [(first[1:], place) if first else ((), place + 1) for (first, place), _ in taken]
        self._may_end = any(token.to_end == 0 for _, token in taken)

    def _next(self, run: _Run) -> QuotedToken | None:
        first, place = run
        return first[0] if first else self._tokens[place]
