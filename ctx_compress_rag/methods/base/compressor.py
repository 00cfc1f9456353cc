"""The base classes of compressors."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.methods.base.part import MethodPart, train_decoder_copy
from ctx_compress_rag.methods.base.rendering import PassageRenderer
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.layers import decoder_layers, decoder_trunk
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.text.tokenizing import bos_token_id, length_batches


class PassageSlots(NamedTuple):
    """The slots of one passage, as a compressor makes them, with gradients in training."""

    slots: Tensor  # (slots, dim)
    token_counts: Tensor  # source tokens per slot: int64 (slots,)

    def soft_context(self) -> SoftContext:
        return SoftContext(self.slots.float().cpu().numpy(), self.token_counts.cpu().numpy())


class SlotBatch(NamedTuple):
    """The slots of a batch of passages."""

    slots: Tensor  # (batch, slots, dim), with zeros at padding
    token_counts: Tensor  # source tokens per slot: (batch, slots), with 0 at padding

    @classmethod
    def of(cls, rows: Sequence[PassageSlots], device: torch.device | None = None) -> Self:
        """Pad the slots of passages into one batch on `device` (None keeps their own device); keep gradients."""
        slots = nn.utils.rnn.pad_sequence([row.slots for row in rows], batch_first=True)
        counts = nn.utils.rnn.pad_sequence([row.token_counts for row in rows], batch_first=True)
        return cls(slots.to(device), counts.to(device))

    def rows(self) -> list[PassageSlots]:
        """Return each passage's slots, without padding; keep gradients."""
        return [
            PassageSlots(slots[counts > 0], counts[counts > 0])
            for slots, counts in zip(self.slots, self.token_counts, strict=True)
        ]


SlotsByRatio = Mapping[int, SlotBatch]


@dataclass(frozen=True)
class TokenizedPassage:
    """A passage's text and its token ids in the decoder's tokenizer, without special tokens."""

    text: str
    ids: list[int]

    @property
    def token_count(self) -> int:
        return len(self.ids)


def pad_token_ids(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad token ids on the right; return ids and mask (int64, 0 at padding), both of shape (rows, length)."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    ids = nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, (torch.arange(ids.shape[1], device=device) < lengths.unsqueeze(1)).long()


class Compressor(MethodPart, PassageRenderer):
    """The base class of compressors, which turn passages into slots."""

    part = "compressor"
    dim: int  # the width of a slot
    batch_tokens = 8192  # the most tokens in a forward pass of `compress`, padding included
    folder: Path | None = None  # that the bundle was loaded from, for a method that keeps files of its own there

    def save_files(self, folder: Path) -> None:
        """Write the method's own files, other than tensors, into the bundle's folder."""

    def looks_ahead(self) -> bool | None:
        """Whether vectors of tokens depend on later ones, if that is up to the decoder's layers; else None."""
        return None

    def forward(self, passages: Sequence[TokenizedPassage], ratios: Sequence[int], window: int) -> SlotsByRatio:
        """Compress a training batch in the windows of `compress`, and return the slots by ratio.

        Slots carry gradients, but not by default, for compressors in which nothing is trained.
        """
        made = {ratio: self.compress(passages, ratio, window) for ratio in ratios}
        return {ratio: SlotBatch.of(rows, self.backbone.device) for ratio, rows in made.items()}

    @abstractmethod
    def compress(self, passages: Sequence[TokenizedPassage], ratio: int, window: int) -> list[PassageSlots]:
        """Return the slots, for a store, of passages of any length: float32, on the CPU, in order.

        Args:
            passages: the passages, none empty.
            ratio: source tokens per slot.
            window: the longest input of the encoder in tokens, a multiple of `ratio`.
        """

    def in_batches(
        self, passages: Sequence[int], lengths: Sequence[int], encode: Callable[[list[int]], Iterable[PassageSlots]]
    ) -> list[PassageSlots]:
        """Encode pieces of passages in batches of similar length, and join the slots of each passage's pieces.

        `passages` has the passage index of each piece, and `lengths` its number of tokens. `encode` gets the indices of
        a batch's pieces and returns their slots.
        """
        batches = length_batches(lengths, self.batch_tokens)
        done = {i: soft for batch in batches for i, soft in zip(batch, encode(batch), strict=True)}
        return join_slots(passages, [done[i] for i in range(len(lengths))])


class TokenCompressor(Compressor):
    """A compressor that reads token ids. It reads a passage longer than its window in pieces (windows).

    If the decoder's tokenizer adds a BOS token, each window is read after a BOS, as in the decoder's training, because
    many decoders use the first position as an attention sink. The papers do not mention it. No slot stands for the BOS.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self._bos = bos_token_id(backbone.tokenizer)

    def behind_bos(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
        """Put the BOS, if there is one, before right-padded texts; return ids, mask and the BOS's length (0 or 1)."""
        if self._bos is None:
            return input_ids, attention_mask, 0
        return F.pad(input_ids, (1, 0), value=self._bos), F.pad(attention_mask, (1, 0), value=1), 1

    @abstractmethod
    def encode(self, input_ids: Tensor, attention_mask: Tensor, ratios: Sequence[int]) -> SlotsByRatio:
        """Compress right-padded passages at each ratio; ids and mask have shape (batch, length)."""

    def forward(self, passages: Sequence[TokenizedPassage], ratios: Sequence[int], window: int) -> SlotsByRatio:
        owners, pieces = token_windows([passage.ids for passage in passages], window)
        done = self.encode(*pad_token_ids(pieces, self.backbone.device), ratios)
        return {ratio: SlotBatch.of(join_slots(owners, batch.rows())) for ratio, batch in done.items()}

    @torch.inference_mode()
    def compress(self, passages: Sequence[TokenizedPassage], ratio: int, window: int) -> list[PassageSlots]:
        owners, pieces = token_windows([passage.ids for passage in passages], window)

        def rows(batch: list[int]) -> list[PassageSlots]:
            compressed = self.encode(*pad_token_ids([pieces[i] for i in batch], self.backbone.device), [ratio])[ratio]
            return SlotBatch(compressed.slots.float().cpu(), compressed.token_counts.long().cpu()).rows()

        return self.in_batches(owners, [len(ids) for ids in pieces], rows)


def mean_pool_slots(vectors: Tensor, weights: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return the weighted mean and the weight of each window of vectors (Simple Context Compression, eq. 3-4).

    Windows do not overlap. Positions of weight 0 (padding) do not count. A window of only padding gives a zero
    vector of weight 0. Sums are at least float32, because in float16 sums over 128 tokens overflow.

    Shape: vectors (..., L, D), weights (..., L) -> (..., ceil(L / window), D), (..., ceil(L / window))
    """
    length = vectors.shape[-2]
    blocks = -(-length // window)
    padding = blocks * window - length
    dtype = vectors.dtype
    wide = vectors.to(torch.promote_types(dtype, torch.float32))
    wide = torch.nn.functional.pad(wide * weights.unsqueeze(-1), (0, 0, 0, padding))
    weights = torch.nn.functional.pad(weights, (0, padding))
    sums = wide.unflatten(-2, (blocks, window)).sum(-2)
    counts = weights.unflatten(-1, (blocks, window)).sum(-1)
    return (sums / counts.clamp(min=1).unsqueeze(-1)).to(dtype), counts


def token_windows(passages: Sequence[Sequence[int]], window: int) -> tuple[list[int], list[Sequence[int]]]:
    """Cut passages into pieces of at most `window` tokens; return the passage index of each piece, and the pieces."""
    starts = [(i, start) for i, ids in enumerate(passages) for start in range(0, max(1, len(ids)), window)]
    return [i for i, _ in starts], [passages[i][start : start + window] for i, start in starts]


def join_slots(passages: Sequence[int], pieces: Sequence[PassageSlots]) -> list[PassageSlots]:
    """Join the slots of consecutive pieces of one passage; `passages` has the passage index of each piece."""
    return [
        PassageSlots(torch.cat([piece.slots for _, piece in own]), torch.cat([piece.token_counts for _, piece in own]))
        for _, group in groupby(zip(passages, pieces, strict=True), key=itemgetter(0))
        for own in [list(group)]
    ]


class TrunkCompressor(Compressor):
    """A compressor whose encoder is the decoder without its head: with LoRA, as a separate copy, or frozen.

    `tune` says how it is trained; its LoRA is not the decoder's (Simple Context Compression, section 5.1). It has the
    decoder's first `layers` layers, None: all; ConfigError if there are fewer. A class that also has the base
    `TokenCompressor` lists `TrunkCompressor` first.
    """

    def __init__(self, backbone: Backbone, tune: TuneConfig, layers: int | None = None) -> None:
        super().__init__(backbone)
        if layers is not None and layers > (has := backbone.config.get_text_config().num_hidden_layers):
            raise ConfigError(f"layers={layers}: the decoder has only {has} layers")
        self.tune = tune
        self.dim = backbone.dim
        self._kept = layers
        self.encoder = self._of(backbone.copy_model()) if tune.mode == "full" else None
        if tune.mode == "lora":
            backbone.add_adapter(self.part, lambda: lora_config(tune), layers)

    def _of(self, model: Any) -> nn.Module:
        """Return a causal LM without its head, or a view of it that runs only the encoder's layers and the norm."""
        trunk: nn.Module = decoder_trunk(model)
        if self._kept is None:
            return trunk
        view, layers = copy.copy(trunk), decoder_layers(model)
        # The copy shares this dictionary with the trunk, which setting a layer would change, too.
        view._modules = {
            name: layers[: self._kept] if child is layers else child for name, child in trunk._modules.items()
        }
        return view

    @torch.no_grad()
    def depends(self, trunk: Any, allowed: Tensor, place: int) -> bool | None:
        """Whether the vector at a place depends on the other of two tokens, under a mask (2, 2), True where seen.

        Returns None if the trunk takes no mask of four dimensions, as one whose layers keep a state.
        """
        weight = self.backbone.embeddings.weight
        ids = torch.tensor([[1, 2], [1, 2]], device=weight.device)
        ids[1, 1 - place] = 3
        # Noise of the embeddings' size, since reserved tokens may all have the same embedding.
        noise = torch.randn(4, self.dim, generator=torch.Generator().manual_seed(0)) * self.backbone.embedding_rms()
        vectors = noise.to(weight.device, weight.dtype)[ids]
        hidden = torch.zeros_like(allowed, dtype=vectors.dtype).masked_fill(~allowed, torch.finfo(vectors.dtype).min)
        mask = hidden.to(vectors.device).expand(2, 1, 2, 2)
        try:
            given = self.backbone.inputs.of(vectors, ids)
            states = trunk(**given, attention_mask=mask, use_cache=False).last_hidden_state[:, place].float()
        except (RuntimeError, ValueError, IndexError):
            return None
        return bool((states[0] - states[1]).norm() > 1e-4 * states[0].norm())

    def trained_parameters(self) -> list[nn.Parameter]:
        """Make the encoder and the method's own weights trainable, as `tune` says, and return them."""
        if self.encoder is not None:
            encoder = train_decoder_copy(self.encoder)
        else:
            encoder = self.backbone.train_adapter(self.part) if self.tune.mode == "lora" else []
        own = [p.requires_grad_(True) for name, p in self.named_parameters() if not name.startswith("encoder.")]
        return [*encoder, *own]  # type: ignore[list-item]

    @contextmanager
    def trunk(self) -> Iterator[Any]:
        """Yield the encoder, a transformers model without a head, locked for this thread within the context."""
        with self.backbone.use(self.part if self.tune.mode == "lora" else None) as model:
            yield self._of(model) if self.encoder is None else self.encoder
