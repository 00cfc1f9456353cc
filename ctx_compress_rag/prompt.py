"""Prompts as a decoder reads them, made of token ids and slots, with a mask of the tokens that are answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
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

    # int64 token ids (L,), or vectors (S, D) in the decoder's embedding space, which torch or NumPy holds
    pieces: tuple[NDArray[Any] | Tensor, ...]
    answers: NDArray[np.bool_]  # (length,), True at the tokens of answers
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
        return sum(len(piece) for piece in self.pieces if is_vectors(piece))

    def ids(self) -> NDArray[np.int64]:
        """Return the token ids (length,), with 0 at the places of vectors."""
        return np.concatenate([np.zeros(len(p), np.int64) if is_vectors(p) else np.asarray(p) for p in self.pieces])

    def vector_mask(self) -> NDArray[np.bool_]:
        """Return a mask (length,) that is True at the places of vectors."""
        return np.concatenate([np.full(len(piece), is_vectors(piece)) for piece in self.pieces])

    def then(self, answer: Sequence[int]) -> Self:
        """Return a copy of the prompt with an answer's token ids appended."""
        flags = np.concatenate((self.answers, np.ones(len(answer), bool)))
        return replace(self, pieces=(*self.pieces, np.array(answer, np.int64)), answers=flags)


def is_vectors(piece: NDArray[Any] | Tensor) -> bool:
    """Whether a piece of a prompt is vectors, and not token ids."""
    return piece.ndim == 2


@dataclass(frozen=True, eq=False)
class PromptTemplate:
    """A prompt with a hole for each passage, in training together with its answers."""

    # Token ids of the text between the holes; hole i is between ids[i] and ids[i + 1].
    ids: tuple[NDArray[np.int64], ...]
    answers: tuple[NDArray[np.bool_], ...]  # masks of the same lengths, True on the answers' tokens

    @classmethod
    def without_answers(cls, ids: Sequence[NDArray[np.int64]]) -> Self:
        return cls(tuple(ids), tuple(np.zeros(len(part), bool) for part in ids))

    def fill(self, slots: Sequence[NDArray[np.float32] | Tensor]) -> Prompt:
        """Return the prompt with the holes filled by `slots`, vectors (S, D) for each hole."""
        pieces: list[NDArray[Any] | Tensor] = [self.ids[0]]
        answers = [self.answers[0]]
        for run, ids, mask in zip(slots, self.ids[1:], self.answers[1:], strict=True):
            pieces += [run, ids]
            answers += [np.zeros(len(run), bool), mask]
        return Prompt(tuple(pieces), np.concatenate(answers), side="reader" if slots else "text")
