"""Prompts as a decoder reads them, made of token ids and slots, with a mask of the tokens that are answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

Message = Mapping[str, str]
"""A chat message: `role` ("system", "user" or "assistant") and `content`, which may hold markers."""

PromptLike = str | Sequence[Message]  # a prompt as users write it: raw text, or a chat

Side = Literal["text", "reader", "blend"]
"""The weights that read a prompt: of plain text, of slots, or of slots with text beside them (`Bundle.sides`)."""


class QuotedToken(NamedTuple):
    """A token of a quotable text. A quotation with this token may end `to_end` tokens after it at the earliest."""

    id: int
    to_end: int


@dataclass(frozen=True, eq=False)
class Quotable:
    """The texts that an extractive answer may quote, as `text.quoting.find_quotations` makes them."""

    tokens: tuple[QuotedToken | None, ...]  # of all texts; None where a quotation cannot continue, as after each text
    # The quotations that begin with a token, by its id. Each is its first tokens that are not in `tokens` (may be
    # empty), and the place in `tokens` where it continues.
    starts: Mapping[int, Sequence[tuple[tuple[QuotedToken, ...], int]]]


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as the decoder reads it, in training together with its answers."""

    pieces: tuple[Tensor, ...]  # int64 token ids (L,), or float vectors (S, D) in the decoder's embedding space
    answers: Tensor  # bool (length,), True at the tokens of answers
    side: Side = "text"  # "text" without passages; a passage may be without slots
    quotable: Quotable | None = None  # for an extractive answer

    @property
    def length(self) -> int:
        return len(self.answers)

    @property
    def token_count(self) -> int:
        return self.length - self.slots

    @property
    def slots(self) -> int:
        return sum(len(piece) for piece in self.pieces if piece.is_floating_point())

    def ids(self) -> Tensor:
        """Return the token ids, int64 (length,), with 0 at the places of vectors."""
        return torch.cat([torch.zeros(len(p), dtype=torch.long) if p.is_floating_point() else p for p in self.pieces])

    def vector_mask(self) -> Tensor:
        """Return a mask, bool (length,), that is True at the places of vectors."""
        return torch.cat([torch.full((len(p),), p.is_floating_point()) for p in self.pieces])

    def then(self, answer: Tensor) -> Self:
        """Return a copy of the prompt with an answer's token ids (L,) appended."""
        flags = torch.ones(len(answer), dtype=torch.bool)
        return replace(self, pieces=(*self.pieces, answer), answers=torch.cat((self.answers, flags)))


@dataclass(frozen=True, eq=False)
class PromptTemplate:
    """A prompt with a hole for each passage, in training together with its answers."""

    ids: tuple[Tensor, ...]  # token ids of the text between the holes; hole i is between ids[i] and ids[i + 1]
    answers: tuple[Tensor, ...]  # bool masks of the same lengths, True on the answers' tokens

    @classmethod
    def without_answers(cls, ids: Sequence[Tensor]) -> Self:
        return cls(tuple(ids), tuple(torch.zeros(len(part), dtype=torch.bool) for part in ids))

    def fill(self, slots: Sequence[Tensor]) -> Prompt:
        """Return the prompt with the holes filled by `slots`, a tensor (S, D) for each hole."""
        pieces, answers = [self.ids[0]], [self.answers[0]]
        for run, ids, mask in zip(slots, self.ids[1:], self.answers[1:], strict=True):
            pieces += [run, ids]
            answers += [torch.zeros(len(run), dtype=torch.bool), mask]
        return Prompt(tuple(pieces), torch.cat(answers), side="reader" if slots else "text")
