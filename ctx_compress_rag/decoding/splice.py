"""Splice token ids and slots into one `inputs_embeds` batch for a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ctx_compress_rag.errors import ConfigError

Piece = Tensor
"""Either int64 token ids (L,) or float slots (S, D), already in the decoder's embedding space."""


@dataclass(frozen=True)
class Spliced:
    """A batch ready for a decoder.

    Attributes:
        inputs_embeds: (batch, length, dim).
        attention_mask: int64 (batch, length), 0 at padding.
        position_ids: int64 (batch, length), counted from each row's first real position.
        slot_mask: bool (batch, length), True where a position is a slot.
    """

    inputs_embeds: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    slot_mask: Tensor

    def model_inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of a transformers causal LM."""
        return {
            "inputs_embeds": self.inputs_embeds,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }


def splice(
    embed: nn.Module, rows: Sequence[Sequence[Piece]], padding_side: Literal["left", "right"] = "left"
) -> Spliced:
    """Embed the ids of each row, put its slots between them, and pad the rows to one length.

    Args:
        embed: the decoder's input embedding layer.
        rows: for each row, its pieces in order.
        padding_side: "left" for generation, "right" for training.

    Raises:
        ConfigError: a row is empty, or slots are not of the decoder's width.
    """
    embedded: list[Tensor] = []
    is_slot: list[Tensor] = []
    device = next(embed.parameters()).device
    for index, row in enumerate(rows):
        parts: list[Tensor] = []
        flags: list[Tensor] = []
        for piece in row:
            slots = piece.is_floating_point()
            parts.append(piece.to(device) if slots else embed(piece.to(device)))
            flags.append(torch.full((piece.shape[0],), slots, dtype=torch.bool, device=device))
        if not parts or sum(part.shape[0] for part in parts) == 0:
            raise ConfigError(f"prompt {index} is empty: give it at least one token")
        dtype = _common_dtype(parts)
        widths = {part.shape[1] for part in parts}
        if len(widths) > 1:
            raise ConfigError(f"slots and token embeddings of prompt {index} differ in width: {sorted(widths)}")
        embedded.append(torch.cat([part.to(dtype) for part in parts]))
        is_slot.append(torch.cat(flags))
    lengths = torch.tensor([row.shape[0] for row in embedded], device=device)
    inputs = nn.utils.rnn.pad_sequence(embedded, batch_first=True, padding_side=padding_side)
    slot_mask = nn.utils.rnn.pad_sequence(is_slot, batch_first=True, padding_side=padding_side)
    places = torch.arange(inputs.shape[1], device=device).expand(len(rows), -1)
    if padding_side == "left":
        positions = places - (inputs.shape[1] - lengths).unsqueeze(1)
    else:
        positions = torch.where(places < lengths.unsqueeze(1), places, -1)
    mask = (positions >= 0).long()
    return Spliced(inputs, mask, positions.clamp(min=0), slot_mask)


def _common_dtype(parts: Sequence[Tensor]) -> torch.dtype:
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    return dtype
