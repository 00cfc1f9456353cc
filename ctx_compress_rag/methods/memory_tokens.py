"""Memory tokens (PISCO, section 3; CLaRa; ICAE, section 2.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.methods.base.compressor import (
    PassageSlots,
    SlotBatch,
    SlotsByRatio,
    TokenizedPassage,
    TrunkCompressor,
    join_slots,
)
from ctx_compress_rag.methods.base.config import OneRatioConfig, TuneConfig, WrapConfig
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.inputs import NO_TOKEN
from ctx_compress_rag.strict import Size
from ctx_compress_rag.text.chat import PromptTokenizer


class MemoryTokensConfig(OneRatioConfig):
    """The settings of memory tokens: the same number of learned vectors follows each window of text, even a short one.

    Attributes:
        slots: the number of memory tokens after a window. A full window has `ratio` times as many source tokens.
        begin: the number of learned vectors before each window.
        bos: where the decoder's BOS stands: before every "window", or as a token of a passage's "first" window.
        eos: whether the decoder's end token stands after each window.
        equal: whether a passage is cut into windows of equal length (ICAE), and not into full windows and a rest.
        encoder, decoder: how each is trained.
        wrap: the learned vectors that the decoder reads around the slots; none by default.
    """

    paper = "PISCO: Pretty Simple Compression for Retrieval-Augmented Generation"

    name: Literal["memory_tokens"] = "memory_tokens"
    slots: Size
    begin: int = Field(default=0, ge=0)
    bos: Literal["window", "first"] = "window"
    eos: bool = False
    equal: bool = False
    encoder: TuneConfig = TuneConfig()
    decoder: TuneConfig = TuneConfig()
    wrap: WrapConfig = WrapConfig()

    @property
    def window(self) -> int:
        return self.ratio * self.slots

    def compressor(self, backbone: Backbone) -> "MemoryTokensCompressor":
        return MemoryTokensCompressor(backbone, self)

    def reader(self, backbone: Backbone, compressor: Any) -> Reader:
        return Reader(backbone, None, self.decoder, self.wrap)


@dataclass(frozen=True)
class _Window:
    """A window: the index of its passage, the token ids that the encoder reads, and the number of source tokens."""

    passage: int
    ids: list[int]
    tokens: int


class MemoryTokensCompressor(TrunkCompressor):
    """A compressor that reads a window and then learned vectors, whose final hidden states are the slots.

    Every window has the same number of slots, so a short passage is hardly compressed. No slot is a mean of others. A
    passage longer than a window is read window by window, where PISCO and CLaRa cut off its end.
    """

    def __init__(self, backbone: Backbone, config: MemoryTokensConfig) -> None:
        super().__init__(backbone, config.encoder)
        self.config = config
        self.memory = nn.Parameter(torch.zeros(config.slots, backbone.dim, device=backbone.device), requires_grad=False)
        self.begin = nn.Parameter(torch.zeros(config.begin, backbone.dim, device=backbone.device), requires_grad=False)

    def trained_parameters(self) -> list[nn.Parameter]:
        """Make all parameters but `begin` trainable, and return them. `begin` stands for a token of the decoder."""
        trained = super().trained_parameters()
        self.begin.requires_grad_(False)
        return [parameter for parameter in trained if parameter is not self.begin]

    def check_ratio(self, ratio: int, stored: int) -> None:
        self.config.check_ratios(stored, [ratio])

    def forward(self, passages: Sequence[TokenizedPassage], ratios: Sequence[int], window: int) -> SlotsByRatio:
        windows = self._windows(passages)
        slots = self._hidden_states([each.ids for each in windows])
        # A slot without a source token is a slot all the same, and a count of 0 would make it padding.
        pieces = [
            PassageSlots(rows, _spread(each.tokens, self.config.slots).clamp(min=1).to(rows.device))
            for rows, each in zip(slots, windows, strict=True)
        ]
        return dict.fromkeys(ratios, SlotBatch.of(join_slots([each.passage for each in windows], pieces)))

    @torch.inference_mode()
    def compress(self, passages: Sequence[TokenizedPassage], ratio: int, window: int) -> list[PassageSlots]:
        windows = self._windows(passages)

        def rows(batch: list[int]) -> list[PassageSlots]:
            slots = self._hidden_states([windows[i].ids for i in batch]).float().cpu()
            counts = [_spread(windows[i].tokens, self.config.slots) for i in batch]
            return list(map(PassageSlots, slots, counts))

        lengths = [len(each.ids) + self.config.slots for each in windows]
        return self.in_batches([each.passage for each in windows], lengths, rows)

    @cached_property
    def _prompts(self) -> PromptTokenizer:
        return PromptTokenizer(self.backbone.tokenizer)

    def _windows(self, passages: Sequence[TokenizedPassage]) -> list[_Window]:
        config = self.config
        eos = [self.backbone.tokenizer.eos_token_id] if config.eos else []
        bos = [self.backbone.tokenizer.bos_token_id]
        windows = []
        for index, passage in enumerate(passages):
            begun = config.begin > 0 or config.bos == "window"
            ids = passage.ids
            if begun:  # after a control token: without the space that some tokenizers put before a first text
                ids = self._prompts.encode(["", self._prompts.as_text(passage.text)])[1].tolist()
            ids = [*(bos if config.bos == "first" else ()), *ids]
            length = config.window
            if config.equal:
                length = -(-len(ids) // -(-len(ids) // length))
            for start in range(0, len(ids), length):
                part = ids[start : start + length]
                tokens = len(part) - (config.bos == "first" and start == 0)
                windows.append(_Window(index, [*(bos if config.bos == "window" else ()), *part, *eos], tokens))
        return windows

    def _hidden_states(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the final hidden states of the memory tokens after each of these texts: (rows, slots, dim)."""
        read, device = self.backbone.inputs, self.backbone.device
        begin, memory = (part.to(self.backbone.dtype) for part in (self.begin, self.memory))
        with self.trunk() as trunk:
            texts = [torch.tensor(ids, dtype=torch.long, device=device) for ids in rows]
            inputs = [torch.cat([begin, read.embed(text), memory]) for text in texts]
            ends = torch.tensor([len(row) for row in inputs], device=device).unsqueeze(1)
            padded = nn.utils.rnn.pad_sequence(inputs, batch_first=True)
            ids = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=NO_TOKEN)
            ids = F.pad(ids, (len(begin), padded.shape[1] - len(begin) - ids.shape[1]), value=NO_TOKEN)
            mask = (torch.arange(padded.shape[1], device=device) < ends).long()
            hidden: Tensor = trunk(**read.of(padded, ids), attention_mask=mask, use_cache=False).last_hidden_state
        places = ends - len(memory) + torch.arange(len(memory), device=device)
        return hidden.gather(1, places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


def _spread(tokens: int, slots: int) -> Tensor:
    """Return source tokens per slot, as even as possible; each slot saw all tokens, so only the sum matters."""
    bounds = torch.arange(slots + 1) * tokens // slots
    return bounds.diff()
