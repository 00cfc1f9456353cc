"""A Llama's layer written out, one prompt at a time, for whoever has other weights or another mask in it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Step = Callable[[Tensor, str], Tensor]
"""What becomes of (n, width) vectors in the part of a layer that has this name."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def rotated(x: Tensor, theta: float) -> Tensor:
    """(heads, n, size), each turned by its position: 0 to n - 1."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None].double() / theta ** (torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def llama_layer(h: Tensor, config: Any, linear: Step, norm: Step, seen: Tensor) -> Tensor:
    """(n, width) -> (n, width).

    Args:
        h: the layer's input.
        config: of the Llama.
        linear: the linear layers, such as "self_attn.q_proj".
        norm: the two norms.
        seen: (n, n), whether a position (row) sees another (column).
    """
    theta = config.rope_parameters["rope_theta"]
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    x = norm(h, "input_layernorm")
    q, k, v = (linear(x, f"self_attn.{name}_proj").view(len(h), n, -1).transpose(0, 1)
               for name, n in (("q", heads), ("k", shared), ("v", shared)))  # fmt: skip
    k, v = (each.repeat_interleave(heads // shared, 0) for each in (rotated(k, theta), v))
    scores = rotated(q, theta) @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    mixed = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
    h = h + linear(mixed.transpose(0, 1).reshape(len(h), -1), "self_attn.o_proj")
    x = norm(h, "post_attention_layernorm")
    return h + linear(F.silu(linear(x, "mlp.gate_proj")) * linear(x, "mlp.up_proj"), "mlp.down_proj")
