"""Pack sequences into rows of one length, with little padding, for layers that are compiled for each new shape."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.layers import decoder_trunk, embeddings_with_gradient, logits_at

logger = logging.getLogger(__name__)

PADDING = -1
_MOVED = 0.1  # of the difference that reading on after another sequence makes


@dataclass(frozen=True)
class _Movable:
    def to(self, device: torch.device) -> Self:
        return type(self)(*(getattr(self, f.name).to(device) for f in fields(self)))


@dataclass(frozen=True)
class PackedRows(_Movable):
    """Sequences in rows of one length. All tensors are (rows, length)."""

    input_ids: Tensor  # 0 at padding and at the positions of slots
    segments: Tensor  # the number of the sequence that a position belongs to, `PADDING` if none
    positions: Tensor  # in the sequence, from 0
    targets: Tensor  # True at tokens to be predicted
    kinds: Tensor  # the kind of each target, for the loss

    def full_attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Return an additive mask (rows, 1, length, length): a position sees its whole sequence, padding padding."""
        allowed = self.segments[:, :, None] == self.segments[:, None, :]
        hidden = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return hidden.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]

    def apart(self) -> tuple["PackedRows", Tensor]:
        """Return the same sequences, one a row, and the new position of each old one in the concatenated rows."""
        counts = torch.bincount(self.segments[self.segments != PADDING])
        length = int(counts.max())
        used = self.segments != PADDING
        moved = self.segments * length + self.positions

        def moved_rows(rows: Tensor, padding: int = 0) -> Tensor:
            made = rows.new_full((len(counts) * length,), padding)
            made[moved[used]] = rows[used]
            return made.view(-1, length)

        own = (moved_rows(getattr(self, f.name), PADDING if f.name == "segments" else 0) for f in fields(self))
        return PackedRows(*own), moved.flatten()

    @property
    def token_count(self) -> int:
        return int((self.segments != PADDING).sum())


@dataclass(frozen=True)
class PackedSlots(_Movable):
    """A batch of passages, and of prompts with positions for the passages' slots."""

    passages: PackedRows  # each passage once
    prompts: PackedRows
    sources: Tensor  # (tokens,), positions of the slots' tokens in the concatenated rows of `passages`, slot after slot
    slots: Tensor  # (tokens,), the slot that each of these tokens belongs to
    places: Tensor  # (slots,), positions of the slots in the concatenated rows of `prompts`

    def apart(self) -> "PackedSlots":
        """Return the same batch with one passage or prompt a row."""
        (passages, sources), (prompts, places) = self.passages.apart(), self.prompts.apart()
        own = {"sources": sources[self.sources], "places": places[self.places]}
        return replace(self, passages=passages, prompts=prompts, **own)

    @property
    def token_count(self) -> int:
        return self.passages.token_count + self.prompts.token_count


class RowPacker:
    """A maker of packed rows of `length` tokens, where a sequence goes into the first row with room for it."""

    def __init__(self, rows: int, length: int) -> None:
        self.length = length
        self._used, self._count = [0] * rows, 0
        ids, positions, targets, kinds = torch.zeros(4, rows, length, dtype=torch.long)
        self.packed = PackedRows(ids, torch.full((rows, length), PADDING), positions, targets.bool(), kinds)

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
        """Place a sequence that `fits`, and return its first position in the concatenated rows.

        `targets`, like `ids` of shape (L,), is True at tokens to be predicted; None means no token.
        """
        length = len(ids)
        row = self._row(length, self._used)
        assert row is not None  # it `fits`
        start = self._used[row]
        place = (row, slice(start, start + length))
        self.packed.input_ids[place] = ids
        self.packed.segments[place] = self._count
        self.packed.positions[place] = torch.arange(length)
        if targets is not None:
            self.packed.targets[place] = targets
            self.packed.kinds[place] = kind
        self._used[row] += length
        self._count += 1
        return row * self.length + start

    def _row(self, length: int, used: list[int]) -> int | None:
        return next((row for row, taken in enumerate(used) if taken + length <= self.length), None)


def collate_packed(items: Sequence[Any]) -> dict[str, Any]:
    """Return the single item as the batch, because the data makes whole batches, and micro-batches hold one item."""
    (batch,) = items
    return {"batch": batch}


def keeps_apart(model: Any) -> bool:
    """Whether a causal LM reads the second of two sequences in a row as if alone; if not, say so in the log.

    transformers tells them apart by their positions, but not in all decoders: some have a mask of their own, or layers
    whose state runs through the row.
    """
    length, embed = 12, model.get_input_embeddings()
    ids = torch.arange(1, 2 * length + 1, device=embed.weight.device)[None] * 7 % embed.num_embeddings
    count = torch.arange(2 * length, device=ids.device)[None]

    def second(start: int, positions: Tensor) -> Tensor:
        read = decoder_trunk(model)(input_ids=ids[:, start:], position_ids=positions, use_cache=False)
        states: Tensor = read.last_hidden_state[0, -length:].float()
        return states

    with embeddings_with_gradient(model) as vectors:
        joined, after, alone = second(0, count % length), second(0, count), second(length, count[:, :length])
        (gradient,) = torch.autograd.grad(joined.pow(2).sum(), vectors[0])
    moved = (joined - alone).abs().max() > _MOVED * (after - alone).abs().max()
    apart = not (moved or gradient[0, :length].any())
    if not apart:
        logger.warning(
            "%s does not keep sequences in one row apart: each gets a row of its own, and training takes longer",
            type(model).__name__,
        )
    return apart


def packed_loss(model: Any, rows: PackedRows, **inputs: Tensor) -> Tensor:
    """Return the cross-entropy of packed prompts' targets: the mean of each kind, averaged over the kinds.

    `inputs` is what the trunk reads of the rows: `input_ids` or `inputs_embeds`. Raises ConfigError without a target.
    """
    wanted = rows.targets[:, 1:]
    if not wanted.any():
        raise ConfigError("no prompt of a batch fits into `packing`: give it a greater length or more rows")
    # Without a mask, transformers finds the sequences by their positions, and makes each layer's mask, of its window.
    logits = logits_at(model, F.pad(wanted, (0, 1)), **inputs, position_ids=rows.positions)
    losses = F.cross_entropy(logits, rows.input_ids[:, 1:][wanted], reduction="none")
    kinds = rows.kinds[:, 1:][wanted]
    return torch.stack([losses[kinds == kind].mean() for kind in kinds.unique()]).mean()
