"""Next-token loss at chosen positions, without logits for the rest and never with all logits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.training.engine.packing import PackedRows

_CHUNK = 256  # positions whose logits are in memory together


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """The logits that a causal LM gives for its trunk's final hidden states, in float32.

    Shape: (positions, dim) -> (positions, vocabulary)
    """
    head = model.get_output_embeddings()
    logits = F.linear(hidden, head.weight, head.bias).float()
    config = model.config.get_text_config()
    if scaling := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scaling
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


class _FrozenHeadLoss(torch.autograd.Function):
    """Cross-entropies under a frozen head: the gradient of a chunk is taken at once, and its logits are dropped."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, weights: Tensor, model: Any) -> Tensor:
        gradient = torch.empty_like(hidden)
        losses = []
        for start in range(0, len(hidden), _CHUNK):
            part = slice(start, start + _CHUNK)
            with torch.enable_grad():
                chunk = hidden[part].detach().requires_grad_(True)
                loss = F.cross_entropy(head_logits(model, chunk), targets[part], reduction="none")
                (gradient[part],) = torch.autograd.grad((loss * weights[part]).sum(), chunk)
            losses.append(loss.detach())
        ctx.save_for_backward(gradient)
        return (torch.cat(losses) * weights).sum()

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total, None, None, None


def weighted_loss(model: Any, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of cross-entropies at chosen positions.

    Plain training slices the last positions out of a batch of hidden states; the slice is not contiguous, and the
    matrix product then copies the whole head for every row. Here positions come as one flat matrix, a few at a time.

    The model's head must be frozen; `hidden` are its trunk's final hidden states.

    Shape: (positions, dim), (positions,), (positions,) -> ()
    """
    total: Tensor = _FrozenHeadLoss.apply(hidden, targets, weights, model)  # type: ignore[no-untyped-call]
    return total


def packed_loss(model: Any, rows: PackedRows, **inputs: Tensor) -> Tensor:
    """Cross-entropy of packed prompts' targets, each kind's mean with the same share.

    Args:
        model: a causal LM whose head is frozen.
        rows: the prompts.
        inputs: what its trunk reads of them: `input_ids` or `inputs_embeds`.

    Raises:
        ConfigError: no prompt has a target.
    """
    wanted = rows.targets[:, 1:]
    if not wanted.any():
        raise ConfigError("no prompt of a batch fits into `packing`: give it a greater length or more rows")
    dtype = model.get_input_embeddings().weight.dtype
    hidden = model.base_model(
        **inputs, attention_mask=rows.mask(True, dtype), position_ids=rows.positions, use_cache=False
    ).last_hidden_state
    weights = _balanced(rows.kinds[:, 1:][wanted])
    return weighted_loss(model, hidden[:, :-1][wanted], rows.input_ids[:, 1:][wanted], weights)


def _balanced(kinds: Tensor) -> Tensor:
    """Weights of targets under which each kind that is there has the same share of a sum of 1: (targets,)."""
    counts = torch.bincount(kinds)
    return (1.0 / (counts[kinds] * (counts > 0).sum())).float()
