"""Extractive answers: tokens that would not quote the prompt or its passages are never chosen.

Slots tell a decoder roughly what a passage says, so it misspells names and numbers. The store has the exact text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import torch
from transformers import LogitsProcessor

from ctx_compress_rag.prompt import Quotable, QuotedToken

_Run = tuple[tuple[QuotedToken, ...], int]


class QuoteProcessor(LogitsProcessor):
    """Allows in each row only tokens that keep its text the beginning of a quotation.

    Args:
        quotables: what each row may quote.
        end_ids: tokens that end an answer.
        limits: most new tokens of each row; a word that does not fit is not begun.
    """

    def __init__(self, quotables: Sequence[Quotable], end_ids: Collection[int], limits: Sequence[int]) -> None:
        self._rows = [_Quotation(each) for each in quotables]
        self._end_ids = sorted(end_ids)
        self._limits = limits

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Mask scores (rows, vocabulary). `input_ids` (rows, new tokens) holds no prompt, which came as embeddings."""
        allowed = torch.zeros(scores.shape, dtype=torch.bool)
        each = zip(self._rows, self._limits, input_ids.tolist(), strict=True)
        for row, (quotation, limit, ids) in enumerate(each):
            if ids:
                quotation.take(ids[-1])
            following = quotation.following(limit - len(ids) - 1)
            allowed[row, list(following)] = True
            if quotation.may_end or not following:
                allowed[row, self._end_ids] = True
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


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
