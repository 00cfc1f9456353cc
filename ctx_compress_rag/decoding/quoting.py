"""Extractive answers: tokens that would not quote the prompt or its passages are never chosen.

Slots tell a decoder roughly what a passage says, so it misspells names and numbers. The store has the exact text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

import torch
from torch import Tensor

from ctx_compress_rag.prompt import Quotable, QuotedToken

_Run = tuple[tuple[QuotedToken, ...], int]


class QuoteFilter:
    """Allows only tokens that keep an answer the beginning of a quotation; a word that exceeds `limit` is not begun."""

    def __init__(self, quotable: Quotable, end_ids: Collection[int], limit: int) -> None:
        self._quotation = _Quotation(quotable)
        self._end_ids = sorted(end_ids)
        self._limit = limit

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        """Mask the scores (vocabulary,) of the token that follows `ids`, the answer so far."""
        if ids:
            self._quotation.take(ids[-1])
        following = self._quotation.following(self._limit - len(ids) - 1)
        allowed = [*following, *(self._end_ids if self._quotation.may_end or not following else ())]
        masked = torch.full_like(scores, -torch.inf)
        masked[allowed] = scores[allowed]
        return masked


class _Quotation:
    """All places where an answer's tokens so far occur in what it may quote."""

    def __init__(self, quotable: Quotable) -> None:
        self._tokens, self._starts = quotable.tokens, quotable.starts
        self._runs: Sequence[_Run] | None = None
        self.may_end = False

    def following(self, left: int) -> set[int]:
        """The tokens, except end tokens, that may come next if at most `left` more tokens may follow."""
        runs = chain.from_iterable(self._starts.values()) if self._runs is None else self._runs
        return {token.id for token in map(self._next, runs) if token is not None and token.to_end <= left}

    def take(self, id: int) -> None:
        """Continue by one token; after an end token only end tokens can follow."""
        runs = self._starts.get(id, ()) if self._runs is None else self._runs
        taken = [(run, token) for run in runs if (token := self._next(run)) is not None and token.id == id]
        self._runs = [(first[1:], place) if first else ((), place + 1) for (first, place), _ in taken]
        self.may_end = any(token.to_end == 0 for _, token in taken)

    def _next(self, run: _Run) -> QuotedToken | None:
        first, place = run
        return first[0] if first else self._tokens[place]
