"""What every compressor does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ctx_compress_rag.part import Part
from ctx_compress_rag.soft_context import SoftContext


class SlotBatch(NamedTuple):
    """Compressed passages of a batch.

    Attributes:
        slots: (batch, slots, dim); zeros at padding.
        token_counts: (batch, slots): source tokens per slot, 0 at padding.
    """

    slots: Tensor
    token_counts: Tensor

    def rows(self) -> list[SoftContext]:
        """One SoftContext per passage, padding dropped; gradients are kept."""
        return [
            SoftContext(slots[counts > 0], counts[counts > 0])
            for slots, counts in zip(self.slots, self.token_counts, strict=True)
        ]


class Compressor(Part):
    """Turns token ids of passages into slots.

    Attributes:
        nestable: True where a coarser ratio is the weighted mean of neighbouring slots.
        dim: width of a slot.
    """

    nestable: ClassVar[bool]
    dim: int

    @abstractmethod
    def forward(self, input_ids: Tensor, attention_mask: Tensor, ratios: Sequence[int]) -> Mapping[int, SlotBatch]:
        """Compress right-padded passages at each ratio.

        Shape: input_ids and attention_mask (batch, length)
        """

    @torch.inference_mode()
    def compress_ids(
        self, passages: Sequence[Sequence[int]], ratio: int, window: int, batch_tokens: int
    ) -> list[SoftContext]:
        """Compress tokenised passages, longer ones window by window.

        Args:
            passages: token ids of each passage, none empty.
            ratio: source tokens per slot.
            window: longest input in tokens, a multiple of `ratio`, so that slots never span two windows.
            batch_tokens: most tokens per forward pass, padding included.
        """
        pieces = [
            (index, ids[start : start + window])
            for index, ids in enumerate(passages)
            for start in range(0, len(ids), window)
        ]
        done: dict[int, list[SoftContext]] = {}
        device = self.backbone.device
        for batch in _batches(pieces, batch_tokens):
            tensors = [torch.tensor(pieces[i][1], dtype=torch.long) for i in batch]
            ids = nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)
            lengths = torch.tensor([len(t) for t in tensors], device=device)
            mask = (torch.arange(ids.shape[1], device=device) < lengths.unsqueeze(1)).long()
            compressed = self(ids, mask, [ratio])[ratio]
            rows = SlotBatch(compressed.slots.float().cpu(), compressed.token_counts.long().cpu()).rows()
            for i, row in zip(batch, rows, strict=True):
                done.setdefault(i, []).append(row)
        by_passage: list[list[SoftContext]] = [[] for _ in passages]
        for i, (index, _) in enumerate(pieces):
            by_passage[index].extend(done[i])
        return [
            SoftContext(torch.cat([row.slots for row in rows]), torch.cat([row.token_counts for row in rows]))
            for rows in by_passage
        ]


def _batches(pieces: Sequence[tuple[int, Sequence[int]]], batch_tokens: int) -> list[list[int]]:
    """Indices of `pieces` in batches of like length, each within `batch_tokens` once padded."""
    batches: list[list[int]] = []
    for i in sorted(range(len(pieces)), key=lambda i: len(pieces[i][1])):
        # Sorted by length, so the newest piece is the batch's longest.
        if batches and (len(batches[-1]) + 1) * len(pieces[i][1]) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
