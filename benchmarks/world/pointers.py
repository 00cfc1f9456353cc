"""Supervised attention: which earlier tokens two heads of a small decoder should look at when it answers.

A small decoder learns within minutes to find an attribute in a passage, but not within hours to distinguish
two passages by the name they are about: an answer needs three steps of attention, none of which lowers the
loss by itself. If the data says what a question is about, one head is shown the name that belongs to each
token of a fact and of an answer, and one head of a later layer the token to copy. (Supervised attention:
Mi, Wang and Ittycheriah 2016; Liu et al. 2016.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.training.prompts import PromptBuilder

_NAME = "ctx_compress_pointing"


@dataclass(frozen=True)
class Pointers:
    """P positions in a batch that should attend to others.

    Attributes:
        rows: the row of the batch that each position is in: (P,).
        positions: the position that attends: (P,).
        first, last: the positions to attend to, both included: (P,).
    """

    rows: Tensor
    positions: Tensor
    first: Tensor
    last: Tensor

    @staticmethod
    def of(found: Sequence[tuple[int, int, int, int]]) -> Pointers:
        """From (row, position, first, last) tuples."""
        return Pointers(*torch.tensor(found, dtype=torch.long).reshape(-1, 4).unbind(1))

    def to(self, device: torch.device) -> Pointers:
        """The same on another device."""
        return Pointers(*(t.to(device) for t in (self.rows, self.positions, self.first, self.last)))


def find(ids: Sequence[int], part: Sequence[int], start: int, stop: int) -> list[int]:
    """The positions in `ids` at which `part` starts, within ids[start:stop]."""
    n = len(part)
    return [i for i in range(start, stop - n + 1) if list(ids[i : i + n]) == list(part)]


def pointers_of(
    builder: PromptBuilder, example: Example, template: str
) -> tuple[Prompt, list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Make a full-text prompt, with pointers from its tokens to what they should attend to.

    Returns: the prompt; pointers to names, from each token of a requested fact and from each position that predicts
        an answer token; pointers from these positions to the token to copy. A pointer is (position, first, last).
        Turns whose subject is unknown or not found have none.
    """
    prompt = builder.text_prompt(example, template)
    ids: list[int] = prompt.ids().tolist()
    runs = _runs(prompt.answers.tolist())
    spans: list[tuple[int, int]] = []
    for passage in example.passages:
        # A passage's first word and last token may be tokenized differently inside the prompt.
        first_word, _, rest = passage.partition(" ")
        inside = builder.passage_ids(f" {rest or first_word}").tolist()[:-1]
        begin = find(ids, inside, spans[-1][1] if spans else 0, runs[0][0])[0]
        spans.append((begin, begin + len(inside)))
    names: list[tuple[int, int, int]] = []
    copies: list[tuple[int, int, int]] = []
    before = spans[-1][1] if spans else 0
    for turn, (start, stop) in zip(example.turns, runs, strict=True):
        asked, before = before, stop
        if not turn.subject:
            continue
        name = builder.passage_ids(" " + turn.subject).tolist()
        value = ids[start : stop - 1]  # without the end token
        mentions = find(ids, name, asked, start)
        for begin, end in spans:
            places = find(ids, name, begin, end)
            facts = [v for v in find(ids, value, begin, end) if places and places[0] < v]
            if not (places and facts and mentions):
                continue
            fact = facts[0]
            owner = max(p for p in places if p < fact)
            for offset in range(len(value)):
                names.append((fact + offset, owner, owner + len(name) - 1))
                names.append((start - 1 + offset, mentions[-1], mentions[-1] + len(name) - 1))
                copies.append((start - 1 + offset, fact + offset, fact + offset))
            break
    return prompt, names, copies


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Start and end (exclusive) of each run of True."""
    edges = [i for i in range(len(flags) + 1) if (i < len(flags) and flags[i]) != (i > 0 and flags[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


class PointingHeads:
    """Reads the attention scores of one head in two layers of a decoder while it runs.

    Args:
        decoder: a transformers causal LM whose attention goes through transformers' interface.
        layers: the layer that points to names, and the one that points to what is copied.
    """

    def __init__(self, decoder: Any, layers: tuple[int, int]) -> None:
        self.decoder = decoder
        self.layers = layers
        self._seen: dict[int, tuple[Tensor, Tensor, float]] = {}
        _register()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context, the decoder's forward passes are recorded."""
        base = getattr(self.decoder, "base_model", self.decoder)
        before = base.config._attn_implementation
        base.config._attn_implementation = _NAME
        base.config._pointing_heads = self
        try:
            yield
        finally:
            base.config._attn_implementation = before
            del base.config._pointing_heads
            self._seen.clear()

    def see(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Keep the first head's part of `query` and `key`, both (batch, heads, length, head dim)."""
        if layer in self.layers:
            self._seen[layer] = (query[:, 0], key[:, 0], scaling)

    def loss(self, which: int, pointers: Pointers) -> Tensor:
        """Mean of -log of the attention on the positions to attend to, for the layer `which` (0 or 1)."""
        query, key, scaling = self._seen[self.layers[which]]
        if not len(pointers.rows):
            return query.sum() * 0.0
        scores = torch.einsum("pd,pld->pl", query[pointers.rows, pointers.positions], key[pointers.rows]) * scaling
        place = torch.arange(key.shape[1], device=key.device)
        scores = scores.float().masked_fill(place > pointers.positions.unsqueeze(1), float("-inf"))
        inside = (place >= pointers.first.unsqueeze(1)) & (place <= pointers.last.unsqueeze(1))
        wanted = scores.masked_fill(~inside, float("-inf"))
        return (scores.logsumexp(1) - wanted.logsumexp(1)).mean()


def _register() -> None:
    """Register an attention with transformers that passes its queries and keys to `PointingHeads`."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Any:
        heads: PointingHeads = module.config._pointing_heads
        heads.see(module.layer_idx, query, key, settings["scaling"])
        return sdpa_attention_forward(module, query, key, value, mask, **settings)

    AttentionInterface.register(_NAME, forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
