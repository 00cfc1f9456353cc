"""What every objective over slots needs: the trained parts, prompts with holes, and logits at the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.decoding.splice import Piece, splice
from ctx_compress_rag.methods.base.compressor import PassageBatch, SlotBatch, Tokenized
from ctx_compress_rag.text.prompts import SlotRow, TokenRow


@dataclass(frozen=True)
class SlotRows:
    """Prompts whose passages are holes.

    Attributes:
        rows: the prompts.
        passages: for each prompt, which passage of the batch fills each hole.
    """

    rows: list[SlotRow]
    passages: list[list[int]]

    def only(self, numbers: Sequence[int]) -> SlotRows:
        """The prompts of these numbers."""
        return SlotRows([self.rows[i] for i in numbers], [self.passages[i] for i in numbers])

    def answer_tokens(self) -> Tensor:
        """How many tokens the answers have: float (1,)."""
        return torch.tensor([sum(int(mask.sum()) for row in self.rows for mask in row.answers)], dtype=torch.float32)


@dataclass
class PassageTable:
    """The passages of a batch, each once: passages that examples share are encoded once."""

    places: dict[str, int] = field(default_factory=dict)
    passages: list[Tokenized] = field(default_factory=list)

    def place(self, text: str, ids: Tensor) -> int:
        """The passage's place in the batch."""
        if text not in self.places:
            self.places[text] = len(self.passages)
            self.passages.append(Tokenized(text, ids.tolist()))
        return self.places[text]

    def batch(self) -> PassageBatch:
        """The passages, padded."""
        return PassageBatch.of(self.passages)


class SlotObjective(nn.Module, ABC):
    """A loss over what the decoder makes of slots.

    Args:
        bundle: what is trained; its trained parameters become this module's.

    Attributes:
        bundle: what is trained.
        ratios: the ratios of the current step.
        sample: how many of them each example draws; None: all examples train all.
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self.compressor = bundle.compressor
        self.reader = bundle.reader
        self.ratios: Sequence[int] = bundle.config.ratios
        self.sample: int | None = None
        self.bundle = bundle
        trained = bundle.compressor.trained_parameters() + bundle.reader.trained_parameters()
        own = {id(p) for p in self.parameters()}
        # Adapters live in the shared decoder, which is not a submodule.
        self.adapters = nn.ParameterList([p for p in trained if id(p) not in own])

    @abstractmethod
    def forward(self, **batch: Any) -> dict[str, Tensor]:
        """The loss of a collated batch, under "loss"."""

    def compress(self, passages: PassageBatch, ratios: Collection[int]) -> dict[int, SlotBatch]:
        """The batch's passages at each of these ratios."""
        on_device = passages.to(self.bundle.backbone.device)
        return dict(self.compressor(on_device, list(ratios), self.bundle.config.max_tokens))

    def drawn(self, rows: int) -> dict[int, list[int]]:
        """For each of the step's ratios, which of so many rows train it; ratios that none trains are left out."""
        everything = list(range(rows))
        if self.sample is None or self.sample >= len(self.ratios):
            return {ratio: everything for ratio in self.ratios}
        order = torch.rand(rows, len(self.ratios)).argsort(1)[:, : self.sample].tolist()
        chosen = {ratio: [row for row in everything if place in order[row]] for place, ratio in enumerate(self.ratios)}
        return {ratio: own for ratio, own in chosen.items() if own}

    def answer_logits(self, prompts: SlotRows, batch: SlotBatch) -> tuple[Tensor, Tensor]:
        """Logits that predict the answers' tokens from slots, and those tokens' ids.

        Shape: (answer tokens, vocabulary), (answer tokens,), prompt after prompt
        """
        contexts = batch.rows()
        # In the decoder's precision: the projection keeps float32, and would draw the whole row with it.
        dtype = self.bundle.backbone.embeddings.weight.dtype
        embedded = {
            p: self.reader(contexts[p].slots, contexts[p].token_counts).to(dtype)
            for row in prompts.passages
            for p in row
        }
        pieces: list[list[Piece]] = []
        answers: list[Tensor] = []
        for row, places in zip(prompts.rows, prompts.passages, strict=True):
            row_pieces: list[Piece] = [row.ids[0]]
            flags = [row.answers[0]]
            for ids, mask, place in zip(row.ids[1:], row.answers[1:], places, strict=True):
                slots = embedded[place]
                row_pieces += [slots, ids]
                flags += [torch.zeros(len(slots), dtype=torch.bool), mask]
            pieces.append(row_pieces)
            answers.append(torch.cat(flags))
        spliced = splice(self.bundle.backbone.embeddings, pieces, "left")
        with self.reader.decoder(spliced.slot_mask) as model:
            return predict(model, spliced.model_inputs(), pieces, answers)

    @torch.no_grad()
    def teacher_log_probs(self, rows: Sequence[TokenRow]) -> list[Tensor]:
        """Each row's log-probabilities at its answers' tokens, read with the text: (answer tokens, vocabulary)."""
        pieces: list[list[Piece]] = [[row.ids] for row in rows]
        inputs = splice(self.bundle.backbone.embeddings, pieces, "left").model_inputs()
        with self.bundle.text_decoder() as model:
            logits, _ = predict(model, inputs, pieces, [row.answers for row in rows])
        return list(F.log_softmax(logits, dim=-1).split([int(row.answers.sum()) for row in rows]))


def predict(
    model: Any, inputs: dict[str, Tensor], rows: Sequence[Sequence[Piece]], answers: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits that predict the answers' tokens, and those tokens' ids.

    Rows are padded on the left, so that logits are computed only for the last positions, where the
    answers are.

    Args:
        model: a transformers causal LM.
        inputs: the spliced rows, as the model takes them.
        rows: the rows' pieces.
        answers: for each row, True on answer tokens: bool (row length,).

    Shape: (answer tokens, vocabulary), (answer tokens,)
    """
    device = inputs["inputs_embeds"].device
    length = inputs["inputs_embeds"].shape[1]
    tail = min(length, max(len(mask) - int(mask.nonzero()[0]) for mask in answers) + 1)
    logits = model(**inputs, use_cache=False, logits_to_keep=tail).logits
    mask = nn.utils.rnn.pad_sequence(list(answers), batch_first=True, padding_side="left").to(device)
    # The logits at a position predict the token after it.
    predicting = F.pad(mask[:, 1:], (0, 1))[:, length - tail :]
    ids = torch.cat([_token_ids(row)[flags] for row, flags in zip(rows, answers, strict=True)]).to(device)
    return logits[predicting].float(), ids


def _token_ids(row: Sequence[Piece]) -> Tensor:
    """The row's token ids, -1 where a slot is: (row length,)."""
    return torch.cat([torch.full(p.shape[:1], -1) if p.is_floating_point() else p.cpu() for p in row])
