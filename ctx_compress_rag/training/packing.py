"""Packing: sequences of many lengths side by side in rows of one length, so that little of a batch is padding.

Rows of one shape are also what compiled layers want: a new shape is compiled anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

PADDING = -1


@dataclass(frozen=True)
class PackedRows:
    """Sequences in rows of one length.

    Attributes:
        input_ids: token ids; 0 at padding and where slots go: (rows, length).
        segments: number of the sequence that a position belongs to, `PADDING` where none: (rows, length).
        positions: places in the sequence, from 0: (rows, length).
        targets: True on tokens to be predicted: (rows, length).
        kinds: which of the loss's kinds a target belongs to: (rows, length).
    """

    input_ids: Tensor
    segments: Tensor
    positions: Tensor
    targets: Tensor
    kinds: Tensor

    def mask(self, causal: bool, dtype: torch.dtype) -> Tensor:
        """An additive mask under which a position attends to its own sequence alone, and to padding from padding.

        Shape: (rows, 1, length, length)
        """
        allowed = self.segments[:, :, None] == self.segments[:, None, :]
        if causal:
            length = self.segments.shape[1]
            allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=allowed.device).tril()
        hidden = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return hidden.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]

    def to(self, device: torch.device) -> PackedRows:
        """The same rows on `device`."""
        return PackedRows(*(getattr(self, f.name).to(device) for f in fields(self)))

    @property
    def token_count(self) -> int:
        """Positions that are no padding."""
        return int((self.segments != PADDING).sum())


@dataclass(frozen=True)
class PackedSlots:
    """A batch of passages, and of prompts with places for their slots.

    Attributes:
        passages: each passage once.
        prompts: the prompts; at the places of slots ids are 0.
        sources: places of tokens in `passages`, rows laid end to end, slot after slot: (tokens,).
        slots: the slot that each of these tokens belongs to: (tokens,).
        places: places of the slots in `prompts`, rows laid end to end: (slots,).
    """

    passages: PackedRows
    prompts: PackedRows
    sources: Tensor
    slots: Tensor
    places: Tensor

    def to(self, device: torch.device) -> PackedSlots:
        """The same batch on `device`."""
        return PackedSlots(*(getattr(self, f.name).to(device) for f in fields(self)))

    @property
    def token_count(self) -> int:
        """Tokens and slots, of passages and prompts together."""
        return self.passages.token_count + self.prompts.token_count


@dataclass
class Packer:
    """Fills `rows` rows of `length` tokens, each sequence into the first row with room for it."""

    rows: int
    length: int
    _used: list[int] = field(init=False)
    _count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        shape = (self.rows, self.length)
        self._used = [0] * self.rows
        self._ids = torch.zeros(shape, dtype=torch.long)
        self._segments = torch.full(shape, PADDING)
        self._positions = torch.zeros(shape, dtype=torch.long)
        self._targets = torch.zeros(shape, dtype=torch.bool)
        self._kinds = torch.zeros(shape, dtype=torch.long)

    def fits(self, *lengths: int) -> bool:
        """Whether sequences of these lengths all have room, placed in this order."""
        used = list(self._used)
        for length in lengths:
            row = self._row(length, used)
            if row is None:
                return False
            used[row] += length
        return True

    def add(self, ids: Tensor, targets: Tensor | None = None, kind: int = 0) -> int:
        """Place a sequence that fits; returns its first position, counted over the rows laid end to end.

        Args:
            ids: token ids: (L,).
            targets: True on tokens to be predicted: (L,); None where there are none.
            kind: of the targets.

        Raises:
            ValueError: it has no room.
        """
        length = len(ids)
        row = self._row(length, self._used)
        if row is None:
            raise ValueError(f"a sequence of {length} tokens has no room in {self.rows} rows of {self.length}")
        start = self._used[row]
        place = (row, slice(start, start + length))
        self._ids[place] = ids
        self._segments[place] = self._count
        self._positions[place] = torch.arange(length)
        if targets is not None:
            self._targets[place] = targets
            self._kinds[place] = kind
        self._used[row] += length
        self._count += 1
        return row * self.length + start

    def packed(self) -> PackedRows:
        """The rows."""
        return PackedRows(self._ids, self._segments, self._positions, self._targets, self._kinds)

    def _row(self, length: int, used: list[int]) -> int | None:
        return next((row for row in range(self.rows) if used[row] + length <= self.length), None)
