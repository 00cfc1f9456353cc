"""ComprExIT (section 3.2)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.methods.base.compressor import SlotBatch, TokenCompressor, mean_pool_slots
from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig
from ctx_compress_rag.methods.base.reader import Reader, TwoLayerMap
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.layers import layer_states
from ctx_compress_rag.strict import Size


class ComprexitConfig(MethodConfig):
    """The settings of ComprExIT, which transmits frozen hidden states to slots explicitly.

    Two switches are the paper's ablations (table 3): `layers: last` leaves out layer aggregation, and
    `allocation: window_attention` leaves out coordinated allocation.

    `gate_dim`, `transport_dim`, `segment_tokens` and `iterations` are the paper's (table 7). `slot_dim`, the width of
    anchors and slots, is how we read the paper's "projection hidden size" of 256 (section 4.1). With it the method adds
    about 1% to the parameters of the paper's decoders, as the paper says. The paper gives neither `temperature` (tau of
    eq. 6), here the square root of 256 as in attention, nor `epsilon`, the weight of the entropy in eq. 11.
    """

    paper = "Context Compression via Explicit Information Transmission"

    name: Literal["comprexit"] = "comprexit"
    layers: Literal["all", "last"] = "all"
    allocation: Literal["transport", "window_attention"] = "transport"
    gate_dim: Size = 256
    slot_dim: Size = 256
    transport_dim: Size = 256
    temperature: float = Field(default=16.0, gt=0)
    segment_tokens: int = Field(default=128, gt=0)
    # Slots should be anchored to their own field and still reach beyond it (figure 7b). Untrained, on the states of a
    # decoder of 4 M weights at 4x, a slot takes 35% of its mass from its field at 0.1, 59% at 0.05 and 72% at 0.02. At
    # 0.02, 30 iterations leave 2% of the mass in the wrong place; at 0.05, less than 0.1%.
    epsilon: float = Field(default=0.05, gt=0)
    iterations: int = Field(default=30, gt=0)

    def compressor(self, backbone: Backbone) -> "ComprexitCompressor":
        return ComprexitCompressor(backbone, self)

    def reader(self, backbone: Backbone, compressor: Any) -> Reader:
        return Reader(backbone, TwoLayerMap(compressor.dim, backbone.dim), TuneConfig(mode="frozen"))


class TransportPlan(nn.Module):
    """The joint plan for all tokens and slots of a segment, by entropic optimal transport (eq. 9-11)."""

    def __init__(self, dim: int, transport_dim: int, epsilon: float, iterations: int) -> None:
        super().__init__()
        self.utility = nn.Linear(dim, transport_dim, bias=False)  # W_u
        self.capacity = nn.Linear(dim, 1, bias=False)  # W_rho; a bias would cancel in the softmax
        self.epsilon = epsilon
        self.iterations = iterations

    def forward(self, anchors: Tensor, mask: Tensor, receivers: Tensor, counts: Tensor) -> Tensor:
        """Return how much of each token goes to each slot. The entries of one segment's plan sum to 1.

        `anchors` are padded on the right, where `mask` is False. `receivers` are means of each local field's anchors
        (eq. 8), the tokens that one slot is anchored to; `counts` their numbers, 0 for fields that a segment lacks.

        Shape: (segments, tokens, dim), (segments, tokens), (segments, slots, dim), (segments, slots)
            -> (segments, tokens, slots)
        """
        senders = F.normalize(self.utility(anchors), dim=-1)
        cosine = senders @ F.normalize(self.utility(receivers), dim=-1).transpose(-1, -2)  # eq. 9
        log_sent = self.capacity(anchors).squeeze(-1).masked_fill(~mask, -torch.inf).log_softmax(-1)  # eq. 10
        return sinkhorn(1 - cosine, log_sent, log_capacities(counts, cosine.dtype), self.epsilon, self.iterations)


class WindowAttention(nn.Module):
    """The ablation without coordinated allocation (section 4.3): each slot attends only to its own local field.

    The paper says only that it is a window attention that keeps locality. Here a slot's query is its receiver, its keys
    are the anchors of its local field, and each slot's weights are normalized separately. `forward` takes and returns
    the same as `TransportPlan.forward`.
    """

    def __init__(self, dim: int, transport_dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, transport_dim, bias=False)
        self.key = nn.Linear(dim, transport_dim, bias=False)

    def forward(self, anchors: Tensor, mask: Tensor, receivers: Tensor, counts: Tensor) -> Tensor:
        keys = self.key(anchors)
        scores = keys @ self.query(receivers).transpose(-1, -2) / keys.shape[-1] ** 0.5
        ends = counts.cumsum(-1).unsqueeze(-2)
        places = torch.arange(anchors.shape[1], device=anchors.device).unsqueeze(-1)
        own = (places < ends) & (places >= ends - counts.unsqueeze(-2))
        # A slot that a segment lacks has no field: with a finite minimum its softmax is not NaN.
        weights = scores.masked_fill(~own, torch.finfo(scores.dtype).min).softmax(-2) * own
        plan: Tensor = weights * log_capacities(counts, scores.dtype).exp().unsqueeze(-2)
        return plan


def log_capacities(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the log of the receivers' capacities 1/K, (segments, slots); minus infinity where there is no slot."""
    there = counts > 0
    shares = -there.sum(-1, keepdim=True).to(dtype).log()
    return shares.expand(counts.shape).masked_fill(~there, -torch.inf)


def sinkhorn(cost: Tensor, log_rows: Tensor, log_columns: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Return the plan of entropy-regularized optimal transport (eq. 11; Cuturi, 2013), computed in the log domain.

    Each iteration fits the rows and then the columns, so the sums of columns are exact up to rounding, and the sums of
    rows up to convergence. Rows and columns of mass 0 (log minus infinity) take no part. A smaller epsilon makes the
    plan sparser and its convergence slower.

    Shape: (..., rows, columns), (..., rows), (..., columns) -> (..., rows, columns)
    """
    scores = -cost / epsilon
    by_row, by_column = log_rows, log_columns
    for _ in range(iterations):
        by_row = log_rows - torch.logsumexp(scores + by_column.unsqueeze(-2), dim=-1)
        by_column = log_columns - torch.logsumexp(scores + by_row.unsqueeze(-1), dim=-2)
    return (scores + by_row.unsqueeze(-1) + by_column.unsqueeze(-2)).exp()


class DepthGates(nn.Module):
    """Gates that mix the hidden states of all layers, token by token (eq. 4-7, before the projection W_a).

    Each layer's state is compared with a weighted mean of all layers' states (the context) in a space of width
    `gate_dim`. `temperature` is that of the softmax over layers.
    """

    def __init__(self, layers: int, dim: int, gate_dim: int, temperature: float) -> None:
        super().__init__()
        self.priors = nn.Parameter(torch.zeros(layers))  # w of eq. 4 is their softmax, which sums to 1
        self.context = nn.Linear(dim, gate_dim, bias=False)  # W_c
        self.layers = nn.ModuleList(nn.Linear(dim, gate_dim, bias=False) for _ in range(layers))  # W_l
        self.layer_embeddings = nn.Parameter(torch.zeros(layers, gate_dim))  # e_l
        self.temperature = temperature

    def gates(self, states: Sequence[Tensor]) -> Tensor:
        """Return the share of each layer (eq. 4-6): layers times (batch, length, dim) -> (batch, length, layers)."""
        context = self.context(_mix(states, self.priors.softmax(0)))
        scores = [
            (context * (layer(state) + embedding)).sum(-1)
            for layer, state, embedding in zip(self.layers, states, self.layer_embeddings, strict=True)
        ]
        return (torch.stack(scores, dim=-1) / self.temperature).softmax(-1)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        return _mix(states, self.gates(states).unsqueeze(-2))


class ComprexitCompressor(TokenCompressor):
    """A compressor of the frozen decoder's hidden states: it mixes them over layers, and transports them to slots.

    The paper's layers 1..L are the outputs of the decoder's L blocks, the last one after the final norm, as
    transformers returns it. The embeddings are not among them. The text is read causally, as always by the decoder.

    A segment holds as many whole local fields of `ratio` tokens as fit into `segment_tokens`, at least one, so that a
    passage has ceil(tokens / ratio) slots at any ratio. Only the last field of a passage may be shorter.

    Slots are eq. 12 times K, the number of slots in the segment, which divides them by the receivers' capacity 1/K. A
    slot is then a weighted mean of the W_g h, and has the same size in whole and short segments and at any ratio. In
    the paper all segments have 32 slots, so K is a constant there that W_g absorbs.
    """

    def __init__(self, backbone: Backbone, config: ComprexitConfig) -> None:
        super().__init__(backbone)
        self.config = config
        self.dim = config.slot_dim
        self.depth: DepthGates | None = None
        if config.layers == "all":
            layers = backbone.config.get_text_config().num_hidden_layers
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
        """Return each layer's hidden states, (batch, length, decoder dim), scaled to a root mean square of 1.

        The paper does not say whether it scales them. States grow from layer to layer, and differ up to 100 times
        between decoders and within one (those of the first token). The scores of eq. 5 grow with their square.

        There is no mask, because with causal attention no token sees the padding on its right.
        """
        input_ids, _, first = self.behind_bos(input_ids, torch.ones_like(input_ids))
        with self.backbone.use(None) as model:
            states = layer_states(model, input_ids=input_ids)
        scaled = (state[:, first:].to(self.anchor.weight.dtype) for state in states)
        return [F.rms_norm(state, state.shape[-1:]) for state in scaled]

    def anchors(self, states: Sequence[Tensor]) -> Tensor:
        """Return token anchors (eq. 7), (batch, length, slot dim). `layers: last` makes them of the last layer."""
        # W_a is linear, so it can follow the sum over layers.
        anchors: Tensor = self.anchor(states[-1] if self.depth is None else self.depth(states))
        return anchors

    def encode(self, input_ids: Tensor, attention_mask: Tensor, ratios: Sequence[int]) -> dict[int, SlotBatch]:
        """Compute hidden states and anchors once, then a plan and slots for each ratio (eq. 8-12)."""
        anchors = self.anchors(self.hidden_states(input_ids))
        return {ratio: self._slots(anchors, attention_mask, ratio) for ratio in ratios}

    def _slots(self, anchors: Tensor, attention_mask: Tensor, ratio: int) -> SlotBatch:
        """Allocate each segment's anchors (batch, length, slot dim) to its slots, and return the slots (eq. 8-12)."""
        size = ratio * max(1, self.config.segment_tokens // ratio)
        blocks = -(-anchors.shape[1] // size)
        padding = blocks * size - anchors.shape[1]
        mask = F.pad(attention_mask, (0, padding)).unflatten(1, (blocks, size))
        real = mask.any(-1)  # the segments that hold tokens; only they are computed, one after the other
        mask = mask[real]
        # Sinkhorn divides by epsilon and exponentiates: bfloat16 is too coarse.
        with torch.autocast(anchors.device.type, enabled=False):
            anchors = F.pad(anchors.to(self.anchor.weight.dtype), (0, 0, 0, padding)).unflatten(1, (blocks, size))
            anchors = anchors[real]
            receivers, counts = mean_pool_slots(anchors, mask, ratio)  # eq. 8
            plan = self.allocation(anchors, mask.bool(), receivers, counts)
            slots = (counts > 0).sum(-1)[:, None, None] * plan.transpose(-1, -2) @ self.value(anchors)  # eq. 12
        all_slots = slots.new_zeros(*real.shape, *slots.shape[1:])
        all_counts = counts.new_zeros(*real.shape, slots.shape[1])
        all_slots[real], all_counts[real] = slots, counts
        return SlotBatch(all_slots.flatten(1, 2), all_counts.flatten(1, 2))


def _mix(states: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return the weighted sum of the states: layers times (..., dim), (..., layers) -> (..., dim)."""
    mixed = states[0] * weights[..., 0]
    for number, state in enumerate(states[1:], 1):
        mixed = mixed + state * weights[..., number]
    return mixed
