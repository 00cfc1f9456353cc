"""ComprExIT (section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.methods.base.compressor import SlotBatch, TokenCompressor
from ctx_compress_rag.methods.comprexit.config import ComprexitConfig
from ctx_compress_rag.methods.comprexit.transport import TransportPlan, WindowAttention
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.soft_context import pool


class Segments(NamedTuple):
    """The segments of a batch that hold tokens, one after the other.

    Attributes:
        real: bool (batch, segments per row), True at segments that hold tokens.
        anchors: (segments, tokens, slot dim).
        counts: (segments, slots), tokens of each slot's local field.
        plan: (segments, tokens, slots).
    """

    real: Tensor
    anchors: Tensor
    counts: Tensor
    plan: Tensor


class DepthGates(nn.Module):
    """Mixes the layers' hidden states, token by token (eq. 4-7, before the projection W_a).

    Args:
        layers: number of layers.
        dim: width of a hidden state.
        gate_dim: width of the space in which states are compared with their context.
        temperature: of the softmax over layers.
    """

    def __init__(self, layers: int, dim: int, gate_dim: int, temperature: float) -> None:
        super().__init__()
        self.priors = nn.Parameter(torch.zeros(layers))  # w of eq. 4 is their softmax, which sums to 1
        self.context = nn.Linear(dim, gate_dim, bias=False)  # W_c
        self.layers = nn.ModuleList(nn.Linear(dim, gate_dim, bias=False) for _ in range(layers))  # W_l
        self.layer_embeddings = nn.Parameter(torch.zeros(layers, gate_dim))  # e_l
        self.temperature = temperature

    def gates(self, states: Sequence[Tensor]) -> Tensor:
        """The share of each layer (eq. 4-6).

        Shape: layers times (batch, length, dim) -> (batch, length, layers)
        """
        context = self.context(_mix(states, self.priors.softmax(0)))
        scores = [
            (context * (layer(state) + embedding)).sum(-1)
            for layer, state, embedding in zip(self.layers, states, self.layer_embeddings, strict=True)
        ]
        return (torch.stack(scores, dim=-1) / self.temperature).softmax(-1)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """Mix the states by their gates: (batch, length, dim)."""
        return _mix(states, self.gates(states).unsqueeze(-2))


class ComprexitCompressor(TokenCompressor):
    """Slots from the frozen decoder's hidden states: mixed over layers, then transported from tokens to slots.

    The paper's layers 1..L are the outputs of the decoder's L blocks, the last one after the final norm, as
    transformers returns it; the embeddings are not among them. The text is read causally, as the decoder
    always reads it.

    A segment holds as many whole local fields of `ratio` tokens as fit into `segment_tokens`, at least one,
    so that a passage has ceil(tokens / ratio) slots at any ratio. Only its last field may be shorter.

    Slots are eq. 12 times K, the number of the segment's slots, that is, divided by the receivers' capacity 1/K.
    A slot is then a weighted mean of the W_g h and has the same size in whole and short segments and at any ratio.
    The paper's segments all have 32 slots, so there K is a constant that W_g absorbs.
    """

    def __init__(self, backbone: Backbone, config: ComprexitConfig) -> None:
        super().__init__(backbone)
        self.config = config
        self.dim = config.slot_dim
        self.depth: DepthGates | None = None
        if config.layers == "all":
            layers = backbone.config.num_hidden_layers
            self.depth = DepthGates(layers, backbone.dim, config.gate_dim, config.temperature)
        self.anchor = nn.Linear(backbone.dim, config.slot_dim, bias=False)  # W_a
        self.allocation: nn.Module = (
            TransportPlan(config.slot_dim, config.transport_dim, config.epsilon, config.iterations)
            if config.allocation == "transport"
            else WindowAttention(config.slot_dim, config.transport_dim)
        )
        self.value = nn.Linear(config.slot_dim, config.slot_dim, bias=False)  # W_g
        self.to(backbone.device)
        self.requires_grad_(False)

    @torch.no_grad()
    def hidden_states(self, input_ids: Tensor) -> list[Tensor]:
        """The hidden states of each layer: (batch, length, decoder dim) each, scaled to a root mean square of 1.

        The paper does not say whether it scales them. States grow from layer to layer and differ by two orders of
        magnitude between decoders and within a decoder (the first token's); the scores of eq. 5 grow with their square.

        There is no mask: with causal attention no token sees the padding on its right.
        """
        input_ids, _, first = self.behind_bos(input_ids, torch.ones_like(input_ids))
        with self.backbone.use(None) as model:
            output = model.base_model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        states = [state[:, first:].to(self.anchor.weight.dtype) for state in output.hidden_states[1:]]
        return [F.rms_norm(state, state.shape[-1:]) for state in states]

    def anchors(self, states: Sequence[Tensor]) -> Tensor:
        """Token anchors (eq. 7); without layer aggregation, from the last layer alone.

        Shape: layers times (batch, length, decoder dim) -> (batch, length, slot dim)
        """
        # W_a is linear, so it can follow the sum over layers.
        anchors: Tensor = self.anchor(states[-1] if self.depth is None else self.depth(states))
        return anchors

    def encode(self, input_ids: Tensor, attention_mask: Tensor, ratios: Sequence[int]) -> dict[int, SlotBatch]:
        """Compute hidden states and anchors once, then a plan and slots for each ratio (eq. 8-12)."""
        anchors = self.anchors(self.hidden_states(input_ids))
        return {ratio: self._slots(self.transport(anchors, attention_mask, ratio)) for ratio in ratios}

    def transport(self, anchors: Tensor, attention_mask: Tensor, ratio: int) -> Segments:
        """Allocate each segment's anchors to its slots (eq. 8-11).

        Shape: (batch, length, slot dim), (batch, length)
        """
        size = ratio * max(1, self.config.segment_tokens // ratio)
        blocks = -(-anchors.shape[1] // size)
        padding = blocks * size - anchors.shape[1]
        mask = F.pad(attention_mask, (0, padding)).unflatten(1, (blocks, size))
        real = mask.any(-1)
        mask = mask[real]
        # Sinkhorn divides by epsilon and exponentiates: bfloat16 is too coarse.
        with torch.autocast(anchors.device.type, enabled=False):
            anchors = F.pad(anchors.to(self.anchor.weight.dtype), (0, 0, 0, padding)).unflatten(1, (blocks, size))
            anchors = anchors[real]
            receivers, counts = pool(anchors, mask, ratio)  # eq. 8
            return Segments(real, anchors, counts, self.allocation(anchors, mask.bool(), receivers, counts))

    def _slots(self, segments: Segments) -> SlotBatch:
        with torch.autocast(segments.anchors.device.type, enabled=False):
            receivers = (segments.counts > 0).sum(-1)[:, None, None]
            slots = receivers * segments.plan.transpose(-1, -2) @ self.value(segments.anchors)  # eq. 12
        batch = slots.new_zeros(*segments.real.shape, *slots.shape[1:])
        counts = segments.counts.new_zeros(*segments.real.shape, slots.shape[1])
        batch[segments.real], counts[segments.real] = slots, segments.counts
        return SlotBatch(batch.flatten(1, 2), counts.flatten(1, 2))


def _mix(states: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Weighted sum of the states: layers times (..., dim), (..., layers) -> (..., dim)."""
    mixed = states[0] * weights[..., 0]
    for number, state in enumerate(states[1:], 1):
        mixed = mixed + state * weights[..., number]
    return mixed
