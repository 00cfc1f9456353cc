"""Vectors that a reader puts around a passage's slots, like the control tokens that some decoders were trained with."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from ctx_compress_rag.strict import Strict


class WrapConfig(Strict):
    """How many vectors go around slots.

    Attributes:
        before: vectors before the slots.
        after: vectors after them.
        every: each run of so many slots is wrapped by itself; None wraps a passage's slots together.
    """

    before: int = Field(default=0, ge=0)
    after: int = Field(default=0, ge=0)
    every: int | None = Field(default=None, gt=0)

    def __bool__(self) -> bool:
        """Whether there are any vectors."""
        return self.before + self.after > 0

    def positions(self, slots: int) -> int:
        """Number of slots and of the vectors around them."""
        runs = 1 if self.every is None else -(-slots // self.every)
        return slots + runs * (self.before + self.after)


class Wrap(nn.Module):
    """Puts the same vectors around the slots of every passage.

    They are vectors, not tokens of the prompt, so that they surround a passage wherever a user's prompt names it, and
    the decoder needs no new tokens.
    """

    def __init__(self, config: WrapConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self.before = nn.Parameter(torch.zeros(config.before, dim))
        self.after = nn.Parameter(torch.zeros(config.after, dim))

    def forward(self, embedded: Tensor) -> Tensor:
        """Surround a passage's slots, already in the decoder's embedding space.

        Shape: (slots, dim) -> (positions(slots), dim)
        """
        runs = embedded.split(self.config.every or max(1, len(embedded)))
        return torch.cat([part for run in runs for part in (self.before, run, self.after)])
