"""The loss on answers, and what is tried beside it: a loss on attention, and evidence to quote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.decoding.splice import predict, splice
from ctx_compress_rag.methods.base.compressor import SlotBatch, Tokenized
from ctx_compress_rag.models.backbone import decoder_layers
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.training.objective import PromptBatch, SlotObjective
from ctx_compress_rag.training.stages.answer import AnswerCollator

HEADS = ((23, 2), (21, 2), (23, 8), (23, 0), (25, 1))
"""(layer, head) of the shipped reader that look most at the sentence of the answer; chosen on training questions."""

QUOTE = "Quote the sentence that answers the question.\n\n{context}\n\nQuestion: {question}"

Span = tuple[int, int, int]
"""A passage's place in the prompt, and the first and last of its tokens that belong to the evidence."""


@dataclass
class SeveralCollator(AnswerCollator):
    """Examples -> the arguments of `SeveralLoss`: answers, where their evidence is, and evidence to quote."""

    quote: bool = False

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        batch = super().__call__(examples)
        asked = [(row, e.turns[0]) for row, e in enumerate(examples) if self.quote and e.turns[0].evidence]
        quotes = [(row, Turn(turn.question, turn.evidence)) for row, turn in asked]
        prompts = [self.builder.holed_prompt(Example(examples[row].passages, (turn,)), QUOTE) for row, turn in quotes]
        places = [batch["prompts"].passages[row] for row, _ in quotes]
        return {
            "passages": batch["passages"],
            "prompts": batch["prompts"],
            "evidence": [[self._span(e.passages, turn) for turn in e.turns] for e in examples],
            "quotes": PromptBatch(prompts, places),
            "quoted": [row for row, _ in quotes],
        }

    def _span(self, passages: Sequence[str], turn: Turn) -> Span | None:
        for number, passage in enumerate(passages):
            for part in turn.evidence:
                if (start := passage.find(part)) >= 0:
                    # Without the space before it, which belongs to the token of its first word.
                    before = len(self.builder.passage_ids(passage[:start].rstrip()))
                    return number, before, len(self.builder.passage_ids(passage[: start + len(part)])) - 1
        return None


class SeveralLoss(SlotObjective):
    """Cross-entropy of the answers' tokens; each example at one of the step's ratios.

    Args:
        bundle: the bundle to train.
        attention: weight of the loss on the attention of `HEADS`.
        quote: weight of the cross-entropy of quoted evidence.
    """

    def __init__(self, bundle: Bundle, attention: float = 0.0, quote: float = 0.0) -> None:
        super().__init__(bundle)
        self.attention, self.quote = attention, quote
        self.sample = 1

    def forward(  # type: ignore[override]
        self,
        passages: Sequence[Tokenized],
        prompts: PromptBatch,
        evidence: list[list[Span | None]],
        quotes: PromptBatch,
        quoted: list[int],
    ) -> dict[str, Tensor]:
        drawn = self.drawn(prompts.prompts)
        answer_tokens, quote_tokens = prompts.answer_tokens(), quotes.answer_tokens().clamp(min=1)
        turns = sum(len(spans) for spans in evidence)
        loss = torch.zeros(())
        for ratio, batch in self.compress(passages, drawn).items():
            rows = drawn[ratio]
            logits, answers, looks = self.read(prompts.only(rows), batch, [evidence[row] for row in rows], ratio)
            loss = loss + F.cross_entropy(logits, answers, reduction="sum") / answer_tokens[0]
            if self.attention and looks:
                loss = loss + self.attention * torch.stack(looks).sum() / (turns * len(HEADS))
            own = [number for number, row in enumerate(quoted) if row in rows]
            if self.quote and own:
                logits, answers = self.answer_logits(quotes.only(own), batch)
                loss = loss + self.quote * F.cross_entropy(logits, answers, reduction="sum") / quote_tokens[0]
        return {"loss": loss}

    def read(
        self, batch: PromptBatch, slots: SlotBatch, evidence: Sequence[Sequence[Span | None]], ratio: int
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits of the answers, their ids, and for each head and answer with evidence -log of the evidence's share.

        The share is that of the attention from the position before the answer to all slots.
        """
        prompts = self.filled(batch, slots)
        spliced = splice(self.bundle.backbone.embeddings, prompts)
        lengths = [[len(piece) for piece in prompt.pieces if piece.is_floating_point()] for prompt in prompts]
        with self.reader.decoder(spliced.slot_mask) as model, attention_inputs(model) as seen:
            logits, answers = predict(model, spliced, prompts)
            looks = []
            for layer, head in HEADS:
                scores = attention_scores(model, layer, head, *seen[layer])
                for row, (prompt, spans) in enumerate(zip(prompts, evidence, strict=True)):
                    at_slots = scores[row][:, spliced.slot_mask[row]]
                    padding = scores.shape[1] - prompt.length
                    for asked, span in zip(answer_starts(prompt), spans, strict=True):
                        if span is not None:
                            first = sum(lengths[row][: span[0]])
                            own = at_slots[padding + asked - 1].log_softmax(-1)
                            part = own[first + span[1] // ratio : first + span[2] // ratio + 1]
                            looks.append(-part.logsumexp(-1))
        return logits, answers, looks


def answer_starts(prompt: Prompt) -> list[int]:
    """The place of each answer's first token."""
    before = F.pad(prompt.answers[:-1], (1, 0))
    return [int(place) for place in (prompt.answers & ~before).nonzero()]


@contextmanager
def attention_inputs(model: Any) -> Iterator[dict[int, tuple[Tensor, tuple[Tensor, Tensor]]]]:
    """What the layers of `HEADS` read in a forward pass: hidden states and rotary embeddings."""
    seen: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}

    def look(layer: int) -> Any:
        def hook(_: Any, __: Any, given: dict[str, Any]) -> None:
            seen[layer] = given["hidden_states"], given["position_embeddings"]

        return hook

    hooks = [
        attention_of(model, layer).register_forward_pre_hook(look(layer), with_kwargs=True)
        for layer in sorted({layer for layer, _ in HEADS})
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def attention_of(model: Any, layer: int) -> Any:
    """A layer's attention."""
    return decoder_layers(model.base_model, model.config.num_hidden_layers)[layer].self_attn


def attention_scores(model: Any, layer: int, head: int, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """The logits of one head's attention, without a mask: (batch, length, length)."""
    attention = attention_of(model, layer)
    group = head // attention.num_key_value_groups
    query = attention.q_proj(hidden).unflatten(-1, (-1, attention.head_dim))[:, :, head]
    key = attention.k_proj(hidden).unflatten(-1, (-1, attention.head_dim))[:, :, group]
    query, key = apply_rotary_pos_emb(query[:, None], key[:, None], *rotary)
    scores: Tensor = attention.scaling * query[:, 0] @ key[:, 0].transpose(1, 2)
    return scores
