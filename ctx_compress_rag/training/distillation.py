"""Distillation from the full-text teacher, summed over ratios (paper 001, section 4.2)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.compressors.base import SlotBatch
from ctx_compress_rag.decoders.splice import Piece, splice
from ctx_compress_rag.training.data import Example, Turn
from ctx_compress_rag.training.prompts import PromptBuilder, SlotRow, TokenRow, draw_template

REPEAT = "Repeat the text."


class DistillationLoss(nn.Module):
    """Sum over ratios of KL(teacher || student) on the answers' tokens (eq. 5-6), mean over examples.

    Args:
        bundle: what is trained. Its decoder as it reads plain text is the teacher.
        reconstruction_weight: weight of the next-token loss of passages repeated from their slots;
            not in the paper, 0 leaves it out.
    """

    def __init__(self, bundle: Bundle, reconstruction_weight: float = 0.0) -> None:
        super().__init__()
        self.compressor = bundle.compressor
        self.reader = bundle.reader
        self.reconstruction_weight = reconstruction_weight
        self.ratios: Sequence[int] = bundle.config.ratios
        self._bundle = (bundle,)
        trained = bundle.compressor.trained_parameters() + bundle.reader.trained_parameters()
        own = {id(p) for p in self.parameters()}
        # Adapters live in the shared decoder, which is not a submodule.
        self.adapters = nn.ParameterList([p for p in trained if id(p) not in own])

    def forward(
        self,
        passage_ids: Tensor,
        passage_mask: Tensor,
        text_rows: list[TokenRow],
        slot_rows: list[SlotRow],
        passages: list[list[int]],
        repeat_rows: list[SlotRow],
        repeated: list[int],
    ) -> dict[str, Tensor]:
        """The loss of a batch.

        Args:
            passage_ids: the batch's passages, each once, right-padded: (passages, length).
            passage_mask: 0 at padding: (passages, length).
            text_rows: each example with its passages as text, for the teacher.
            slot_rows: each example with holes for its passages.
            passages: for each example, which passage fills each hole.
            repeat_rows: prompts whose answer is a passage's own text.
            repeated: the passage of each of `repeat_rows`.
        """
        targets = self._teacher_log_probs(text_rows)
        compressed = self.compressor(passage_ids, passage_mask, self.ratios)
        loss = torch.zeros((), device=passage_ids.device)
        for ratio in self.ratios:
            logits, _ = self._student(slot_rows, passages, compressed[ratio])
            student = F.log_softmax(logits, dim=-1)
            loss = loss + F.kl_div(student, targets, reduction="sum", log_target=True) / len(slot_rows)
            if self.reconstruction_weight and repeat_rows:
                logits, answers = self._student(repeat_rows, [[p] for p in repeated], compressed[ratio])
                loss = loss + self.reconstruction_weight * F.cross_entropy(logits, answers)
        return {"loss": loss}

    @torch.no_grad()
    def _teacher_log_probs(self, rows: Sequence[TokenRow]) -> Tensor:
        """Log-probabilities at the answers' tokens, rows one after the other: (answer tokens, vocabulary)."""
        bundle = self._bundle[0]
        with bundle.text_decoder() as model:
            logits, _ = _answer_logits(model, [[row.ids] for row in rows], [row.answers for row in rows])
        return F.log_softmax(logits, dim=-1)

    def _student(
        self, rows: Sequence[SlotRow], passages: Sequence[Sequence[int]], batch: SlotBatch
    ) -> tuple[Tensor, Tensor]:
        contexts = batch.rows()
        # In the decoder's precision: the projection keeps float32, and would draw the whole row with it.
        dtype = self._bundle[0].backbone.embeddings.weight.dtype
        embedded = {
            p: self.reader(contexts[p].slots, contexts[p].token_counts).to(dtype) for row in passages for p in row
        }
        pieces: list[list[Piece]] = []
        answers: list[Tensor] = []
        for row, row_passages in zip(rows, passages, strict=True):
            row_pieces: list[Piece] = [row.ids[0]]
            flags = [row.answers[0]]
            for ids, mask, passage in zip(row.ids[1:], row.answers[1:], row_passages, strict=True):
                slots = embedded[passage]
                row_pieces += [slots, ids]
                flags += [torch.zeros(len(slots), dtype=torch.bool), mask]
            pieces.append(row_pieces)
            answers.append(torch.cat(flags))
        with self.reader.decoder() as model:
            return _answer_logits(model, pieces, answers)


def _answer_logits(model: Any, rows: Sequence[Sequence[Piece]], answers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits that predict the answers' tokens, and those tokens' ids.

    Rows are padded on the left, so that logits are computed only for the last positions, where the
    answers are.

    Shape: answers: bool (row length,) each -> (answer tokens, vocabulary), (answer tokens,)
    """
    batch = splice(model.get_input_embeddings(), rows, "left")
    device = batch.inputs_embeds.device
    tail = max(len(mask) - int(mask.nonzero()[0]) for mask in answers) + 1
    length = batch.inputs_embeds.shape[1]
    tail = min(tail, length)
    logits = model(**batch.model_inputs(), use_cache=False, logits_to_keep=tail).logits
    mask = nn.utils.rnn.pad_sequence(list(answers), batch_first=True, padding_side="left").to(device)
    # The logits at a position predict the token after it.
    predicting = F.pad(mask[:, 1:], (0, 1))[:, length - tail :]
    ids = torch.cat([_token_ids(row)[flags] for row, flags in zip(rows, answers, strict=True)]).to(device)
    return logits[predicting].float(), ids


def _token_ids(row: Sequence[Piece]) -> Tensor:
    """The row's token ids, -1 where a slot is: (row length,)."""
    return torch.cat([torch.full(p.shape[:1], -1) if p.is_floating_point() else p.cpu() for p in row])


class DistillationCollator:
    """Examples -> the arguments of `DistillationLoss`, passages shared by examples encoded once.

    Args:
        builder: renders prompts.
        templates: prompt templates, one drawn for each example.
        max_context_tokens: longest context of an example, shared evenly by its passages.
        repeat: how many passages of a batch are also repeated from their slots.
        seed: of the draws.
    """

    def __init__(
        self, builder: PromptBuilder, templates: Sequence[str], max_context_tokens: int, repeat: int, seed: int
    ) -> None:
        self.builder = builder
        self.templates = templates
        self.max_context_tokens = max_context_tokens
        self.repeat = repeat
        self.seed = seed

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        places: dict[str, int] = {}
        ids: list[Tensor] = []
        text_rows: list[TokenRow] = []
        slot_rows: list[SlotRow] = []
        passages: list[list[int]] = []
        for example in examples:
            template = draw_template(self.templates, example, self.seed)
            row: list[int] = []
            texts: list[str] = []
            for text, passage_ids in self.builder.shortened(example.passages, self.max_context_tokens):
                if text not in places:
                    places[text] = len(ids)
                    ids.append(passage_ids)
                row.append(places[text])
                texts.append(text)
            text_rows.append(self.builder.text_row(example, template, texts))
            slot_rows.append(self.builder.slot_row(example, template))
            passages.append(row)
        rng = random.Random(f"{self.seed}:{examples[0].turns[0].question}")
        texts = rng.sample(list(places), min(self.repeat, len(places)))
        repeat_rows = [
            self.builder.slot_row(Example((text,), (Turn(REPEAT, (text,)),)), "{context}\n\n{question}")
            for text in texts
        ]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        lengths = torch.tensor([len(i) for i in ids])
        return {
            "passage_ids": padded,
            "passage_mask": (torch.arange(padded.shape[1]) < lengths.unsqueeze(1)).long(),
            "text_rows": text_rows,
            "slot_rows": slot_rows,
            "passages": passages,
            "repeat_rows": repeat_rows,
            "repeated": [places[text] for text in texts],
        }
